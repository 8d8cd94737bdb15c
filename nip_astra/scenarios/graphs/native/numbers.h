/* Products of small matrices, and functions of numbers, on float32 without gaps.

   A number of columns is a multiple of 16, one of inner numbers or rows need not be. Arrays that
   are written are not those that are read, but where it is said. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#define LANES 8
#define TILE_ROWS 6
#else
#define LANES 4
#define TILE_ROWS 4
#endif
#define TILE 16
#define VECTORS (TILE / LANES)
typedef intptr_t extent;

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vec load(const float *from) { return *(const loose *)from; }
INLINE void store(float *to, vec x) { *(loose *)to = x; }
INLINE vec all(float x) { return x - (vec){0}; }

/* Gives x with the parts of so many lanes exchanged. */
#if defined(__clang__)
#define EXCHANGED(x, lanes) __builtin_shufflevector(x, x, ORDER(lanes))
#else
#define EXCHANGED(x, lanes) __builtin_shuffle(x, (ivec){ORDER(lanes)})
#endif
#if LANES == 8
#define ORDER(lanes)                                                                         \
    0 ^ lanes, 1 ^ lanes, 2 ^ lanes, 3 ^ lanes, 4 ^ lanes, 5 ^ lanes, 6 ^ lanes, 7 ^ lanes
#else
#define ORDER(lanes) 0 ^ lanes, 1 ^ lanes, 2 ^ lanes, 3 ^ lanes
#endif

/* The sum of all lanes, in each of them. */
INLINE vec sum(vec x) {
#if LANES == 8
    x += EXCHANGED(x, 4);
#endif
    x += EXCHANGED(x, 2);
    return x + EXCHANGED(x, 1);
}

/* ---- products of matrices: C = A B, on top of a bias or of C itself */

enum start { NOTHING, BIAS, ITSELF };

typedef struct {
    const float *at;
    extent row, column; /* distances of neighbours, so that a transposed matrix is one too */
} matrix;

INLINE void tile(int rows, enum start start, extent inner, matrix a, const float *b, extent b_row,
                 float *c, extent c_row, const float *bias) {
    vec sums[TILE_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sums[m][v] = start == NOTHING ? (vec){0}
                         : start == BIAS  ? load(bias + v * LANES)
                                          : load(c + m * c_row + v * LANES);
    for (extent k = 0; k < inner; k++) {
        vec right[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) right[v] = load(b + k * b_row + v * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            vec left = all(a.at[m * a.row + k * a.column]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[m][v] += left * right[v];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(c + m * c_row + v * LANES, sums[m][v]);
}

#define TILES(count, is_wanted)                                                                  \
    for (; m + count <= rows && (is_wanted); m += count) {                                       \
        matrix from = {a.at + m * a.row, a.row, a.column};                                       \
        tile(count, start, inner, from, b + n, columns, c + m * columns + n, columns, bias + n); \
    }

INLINE void product(enum start start, extent rows, extent columns, extent inner, matrix a,
                    const float *b, float *c, const float *bias) {
    for (extent n = 0; n < columns; n += TILE) {
        extent m = 0;
        TILES(TILE_ROWS, rows - m != 8) /* 4 and 4 rows are faster than 6, 1 and 1 */
        TILES(4, 1)
        TILES(1, 1)
    }
}

static void multiply(extent rows, extent columns, extent inner, matrix a, const float *b,
                     float *c) {
    product(NOTHING, rows, columns, inner, a, b, c, b);
}

static void multiply_on_bias(extent rows, extent columns, extent inner, matrix a, const float *b,
                             float *c, const float *bias) {
    product(BIAS, rows, columns, inner, a, b, c, bias);
}

static void multiply_on_itself(extent rows, extent columns, extent inner, matrix a, const float *b,
                               float *c) {
    product(ITSELF, rows, columns, inner, a, b, c, b);
}

INLINE matrix plain(const float *at, extent width) { return (matrix){at, width, 1}; }
INLINE matrix transposed(const float *at, extent width) { return (matrix){at, 1, width}; }

static void transpose(extent rows, extent columns, const float *from, float *to) {
    for (extent i = 0; i < rows; i++)
        for (extent j = 0; j < columns; j++) to[j * rows + i] = from[i * columns + j];
}

static void add_column_sums(extent rows, extent columns, const float *from, float *sums) {
    for (extent n = 0; n < columns; n += LANES) {
        vec total = load(sums + n);
        for (extent m = 0; m < rows; m++) total += load(from + m * columns + n);
        store(sums + n, total);
    }
}

/* ---- functions of numbers */

/* What is no number stays so in x. */
#if LANES == 8
INLINE vec at_least(vec x, vec bound) { return __builtin_ia32_maxps256(bound, x); }
INLINE vec at_most(vec x, vec bound) { return __builtin_ia32_minps256(bound, x); }
#else
INLINE vec chosen(ivec which, vec x, vec y) {
    return (vec)((which & (ivec)x) | (~which & (ivec)y));
}
INLINE vec at_least(vec x, vec bound) { return chosen(x < bound, bound, x); }
INLINE vec at_most(vec x, vec bound) { return chosen(x > bound, bound, x); }
#endif

/* The highest of all lanes, in each of them. */
INLINE vec highest_of(vec x) {
#if LANES == 8
    x = at_least(x, EXCHANGED(x, 4));
#endif
    x = at_least(x, EXCHANGED(x, 2));
    return at_least(x, EXCHANGED(x, 1));
}

/* 2^x: 2^n times a polynomial in the rest, at most 1/2. Below -126 as there; NaN stays NaN. */
INLINE vec power_of_two(vec x) {
    x = at_least(x, all(-126));
    vec shifted = x + 12582912.0f; /* rounds to the nearest integer, in the low bits */
    vec rest = x - (shifted - 12582912.0f);
    vec value = all(1.5403530e-4f); /* ln(2)^k / k! */
    value = value * rest + 1.3333558e-3f;
    value = value * rest + 9.6181291e-3f;
    value = value * rest + 5.5504109e-2f;
    value = value * rest + 2.4022651e-1f;
    value = value * rest + 6.9314718e-1f;
    value = value * rest + 1;
    return (vec)((ivec)value + ((ivec)shifted << 23));
}

#define LOG2_E 1.44269504f

/* A rational function of least error, 4e-7 with the rounding; beyond 8.5 it is that of 8.5. */
INLINE vec hyperbolic_tangent(vec x) {
    x = at_most(at_least(x, all(-8.5f)), all(8.5f));
    vec square = x * x;
    vec above = square * 1.409924611e-8f + 2.112157235e-5f;
    vec below = square * 8.073619921e-7f + 3.335690540e-4f;
    above = above * square + 3.525819424e-3f;
    below = below * square + 2.599113617e-2f;
    above = above * square + 1.340620618e-1f;
    below = below * square + 4.673951757e-1f;
    above = above * square + 1;
    below = below * square + 1;
    return x * above / below;
}

static void tanh_of(extent size, const float *from, float *to) {
    for (extent i = 0; i < size; i += LANES) store(to + i, hyperbolic_tangent(load(from + i)));
}

/* The derivative in x from that in y = tanh(x). */
static void through_tanh(extent size, const float *y, float *gradient) {
    for (extent i = 0; i < size; i += LANES) {
        vec value = load(y + i);
        store(gradient + i, load(gradient + i) * (1 - value * value));
    }
}

/* ---- arrays */

/* Where there is nothing, there may be no memory either. */
static void clear(extent size, float *x) {
    if (size) memset(x, 0, size * sizeof(float));
}

static void copy(extent size, const float *from, float *to) {
    if (size) memcpy(to, from, size * sizeof(float));
}

static void add(extent size, const float *x, float *to) {
    for (extent i = 0; i < size; i += LANES) store(to + i, load(to + i) + load(x + i));
}

typedef struct {
    float *next;
} pieces;

/* The next part of memory that was asked for at once. */
static float *piece(pieces *left, extent size) {
    float *found = left->next;
    left->next += size;
    return found;
}

INLINE extent smaller(extent a, extent b) { return a < b ? a : b; }

/* ---- softmax of rows */

static void softmax(extent rows, extent columns, float *x) {
    for (extent m = 0; m < rows; m++, x += columns) {
        vec highest = load(x), total = {0};
        for (extent j = LANES; j < columns; j += LANES) highest = at_least(load(x + j), highest);
        vec most = highest_of(highest);
        for (extent j = 0; j < columns; j += LANES) {
            /* Not as small as can be: with numbers near the least some processors are slow. */
            vec share = power_of_two(at_least((load(x + j) - most) * LOG2_E, all(-100)));
            store(x + j, share);
            total += share;
        }
        vec scale = 1 / sum(total);
        for (extent j = 0; j < columns; j += LANES) store(x + j, load(x + j) * scale);
    }
}

/* The derivative in scores from that in shares. */
static void through_softmax(extent rows, extent columns, const float *shares, float *gradient) {
    for (extent m = 0; m < rows; m++, shares += columns, gradient += columns) {
        vec along = {0};
        for (extent j = 0; j < columns; j += LANES) along += load(shares + j) * load(gradient + j);
        vec mean = sum(along);
        for (extent j = 0; j < columns; j += LANES)
            store(gradient + j, load(shares + j) * (load(gradient + j) - mean));
    }
}

/* ---- rows that are normalised: (x - mean) scale * gain + shift */

#define NORM_EPS 1e-5f

/* Normalises in place and gives each row's scale. */
static void normalise(extent rows, extent d, float *x, float *scale) {
    for (extent m = 0; m < rows; m++, x += d) {
        vec total = {0}, squares = {0};
        for (extent i = 0; i < d; i += LANES) total += load(x + i);
        vec mean = sum(total) / (float)d;
        for (extent i = 0; i < d; i += LANES) {
            vec apart = load(x + i) - mean;
            squares += apart * apart;
        }
        scale[m] = 1 / sqrtf(sum(squares)[0] / d + NORM_EPS);
        for (extent i = 0; i < d; i += LANES) store(x + i, (load(x + i) - mean) * scale[m]);
    }
}

typedef struct {
    const float *gain, *shift;
    float *of_gain, *of_shift;
} norm;

static void weigh(const norm *p, extent rows, extent d, const float *normed, float *result) {
    for (extent m = 0; m < rows; m++, normed += d, result += d)
        for (extent i = 0; i < d; i += LANES)
            store(result + i, load(normed + i) * load(p->gain + i) + load(p->shift + i));
}

static void through_norm(const norm *p, extent rows, extent d, const float *gradient,
                         const float *normed, const float *scale, float *of_x) {
    for (extent m = 0; m < rows; m++, gradient += d, normed += d, of_x += d) {
        vec total = {0}, along = {0};
        for (extent i = 0; i < d; i += LANES) {
            vec given = load(gradient + i), value = load(normed + i);
            store(p->of_gain + i, load(p->of_gain + i) + given * value);
            store(p->of_shift + i, load(p->of_shift + i) + given);
            vec weighted = given * load(p->gain + i);
            total += weighted;
            along += weighted * value;
        }
        vec mean = sum(total) / (float)d, mean_along = sum(along) / (float)d;
        for (extent i = 0; i < d; i += LANES) {
            vec weighted = load(gradient + i) * load(p->gain + i);
            store(of_x + i, (weighted - mean - load(normed + i) * mean_along) * scale[m]);
        }
    }
}

/* Takes gain and shift; where derivatives are asked for, what they are added to becomes 0. */
static norm norm_of(extent d, const float *const *weights, float *const *of_weights) {
    norm p = {weights[0], weights[1], NULL, NULL};
    if (of_weights) {
        p.of_gain = of_weights[0];
        p.of_shift = of_weights[1];
        clear(d, p.of_gain);
        clear(d, p.of_shift);
    }
    return p;
}
