/* What the networks of small graphs are made of: blocks of rows, and a perceptron.

   Shapes: D width, F hidden width, G graphs, n nodes (padded). */

#pragma once

#include <stdlib.h>

#include "numbers.h"

/* Rows computed at once: what belongs to them stays in a cache of 32 KiB. */
#define BLOCK 36

/* Nodes of a graph without those of padding, which come last. */
static extent count_nodes(const unsigned char *is_node, extent g, extent n) {
    extent count = n;
    while (count && !is_node[g * n + count - 1]) count--;
    return count;
}

/* ---- a perceptron of two layers on a block of rows */

typedef struct {
    extent width, hidden_width;
    const float *inner, *inner_bias, *outer, *outer_bias; /* [F, D], [F], [D, F], [D] */
    float *inner_t, *outer_t;                             /* transposed: [D, F], [F, D] */
    float *of_inner, *of_inner_bias, *of_outer, *of_outer_bias;
} perceptron;

/* Takes the matrix and bias of the inner map, then of the outer one, and memory for 2 D F numbers;
   where derivatives are asked for, what they are added to becomes 0. */
static perceptron perceptron_of(extent d, extent f, const float *const *weights,
                                float *const *of_weights, pieces *memory) {
    perceptron p = {.width = d, .hidden_width = f, .inner = weights[0], .inner_bias = weights[1],
                    .outer = weights[2], .outer_bias = weights[3]};
    p.inner_t = piece(memory, d * f);
    p.outer_t = piece(memory, d * f);
    transpose(f, d, p.inner, p.inner_t);
    transpose(d, f, p.outer, p.outer_t);
    if (of_weights) {
        p.of_inner = of_weights[0];
        p.of_inner_bias = of_weights[1];
        p.of_outer = of_weights[2];
        p.of_outer_bias = of_weights[3];
        clear(d * f, p.of_inner);
        clear(f, p.of_inner_bias);
        clear(d * f, p.of_outer);
        clear(d, p.of_outer_bias);
    }
    return p;
}

static void hidden_of(const perceptron *p, extent rows, const float *x, float *hidden) {
    extent d = p->width, f = p->hidden_width;
    multiply_on_bias(rows, f, d, plain(x, d), p->inner_t, hidden, p->inner_bias);
    tanh_of(rows * f, hidden, hidden);
}

static void result_of(const perceptron *p, extent rows, const float *hidden, float *y) {
    extent d = p->width, f = p->hidden_width;
    multiply_on_bias(rows, d, f, plain(hidden, f), p->outer_t, y, p->outer_bias);
}

static void through_perceptron(const perceptron *p, extent rows, const float *gradient,
                               const float *x, const float *hidden, float *of_hidden,
                               float *of_x) {
    extent d = p->width, f = p->hidden_width;
    multiply(rows, f, d, plain(gradient, d), p->outer, of_hidden);
    through_tanh(rows * f, hidden, of_hidden);
    multiply(rows, d, f, plain(of_hidden, f), p->inner, of_x);
    multiply_on_itself(f, d, rows, transposed(of_hidden, f), x, p->of_inner);
    multiply_on_itself(d, f, rows, transposed(gradient, d), hidden, p->of_outer);
    add_column_sums(rows, f, of_hidden, p->of_inner_bias);
    add_column_sums(rows, d, gradient, p->of_outer_bias);
}
