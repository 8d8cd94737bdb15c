/* Layers for small graphs, each in one pass over blocks of rows that stay in the cache.

   Called from native.py; the formulas stand in derivatives.py. Each function gives 0, or 1 where
   memory is lacking. Widths D, E and F are multiples of 16.

   Shapes: B frames, G = 2 B graphs, or other groups, n nodes (padded), D width, E width of a token,
   F hidden width, R rows, J heads times D, T tokens of a group, Q = T J / D queries of a group, K
   keys of a group, P keys rounded up to a multiple of 16. */

#include <stdlib.h>

#include "native_numbers.h"

/* Rows computed at once: what belongs to them stays in a cache of 32 KiB. */
#define BLOCK 36

/* How many groups of so many rows are computed at once. */
static extent groups_at_once(extent groups, extent rows) {
    return smaller(groups, rows && rows < BLOCK ? BLOCK / rows : 1);
}

/* ---- a perceptron of two layers on a block of rows */

typedef struct {
    extent width, hidden_width;
    const float *inner, *inner_bias, *outer, *outer_bias; /* [F, D], [F], [D, F], [D] */
    float *inner_t, *outer_t;                             /* transposed: [D, F], [F, D] */
    float *of_inner, *of_inner_bias, *of_outer, *of_outer_bias;
} perceptron;

static void begin_forward(perceptron *p, pieces *memory) {
    extent size = p->width * p->hidden_width;
    p->inner_t = piece(memory, size);
    p->outer_t = piece(memory, size);
    transpose(p->hidden_width, p->width, p->inner, p->inner_t);
    transpose(p->width, p->hidden_width, p->outer, p->outer_t);
}

static void begin_backward(const perceptron *p) {
    clear(p->width * p->hidden_width, p->of_inner);
    clear(p->hidden_width, p->of_inner_bias);
    clear(p->width * p->hidden_width, p->of_outer);
    clear(p->width, p->of_outer_bias);
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

/* ---- the graph network: from what was said to node tokens, and sums of nodes */

/* Graphs whose nodes are computed at once: those of padding, which come last, are left out. */
typedef struct {
    extent first, count, rows;
} block;

static extent count_nodes(const unsigned char *is_node, extent g, extent n) {
    extent count = n;
    while (count && !is_node[g * n + count - 1]) count--;
    return count;
}

/* What is computed of a block in one layer. */
typedef struct {
    float *active, *sums, *hidden;
} passed;

/* Weights of layer i: the matrix and bias of the inner map, then of the outer one. */
static perceptron layer_of(extent d, extent f, const float *const *weights,
                           float *const *of_weights, extent i, pieces *memory) {
    const float *const *of_layer = weights + 4 * i;
    perceptron p = {d, f, of_layer[0], of_layer[1], of_layer[2], of_layer[3]};
    begin_forward(&p, memory);
    if (of_weights) {
        p.of_inner = of_weights[4 * i];
        p.of_inner_bias = of_weights[4 * i + 1];
        p.of_outer = of_weights[4 * i + 2];
        p.of_outer_bias = of_weights[4 * i + 3];
        begin_backward(&p);
    }
    return p;
}

/* What the network reads of frames, and its weights. Graph g is half g % 2 of frame g / 2. */
typedef struct {
    extent layers, graphs, n, d, f, e, num_said, num_last;
    const float *said, *adjacency, *last; /* [B, num_said, 2 n], [G, n, n], [B, num_last, 2 n] */
    const unsigned char *is_node;         /* [G, n] */
    const float *input, *input_bias;      /* [num_said, D], [D] */
    const float *node, *node_t, *bias;    /* [E, D], [D, E], [E] */
    const float *message;                 /* [num_last, E] */
    perceptron *layer;
} network;

/* One number of each node of a graph, a row, from what is there of all numbers and both graphs. */
static matrix of_graph(const float *said, extent count, extent g, extent n) {
    return (matrix){said + (g / 2) * count * 2 * n + (g % 2) * n, 1, 2 * n};
}

static matrix turned(matrix a) { return (matrix){a.at, a.column, a.row}; }

static block next_block(const network *p, block last) {
    block next = {last.first + last.count, 0, 0};
    while (next.first + next.count < p->graphs) {
        extent rows = count_nodes(p->is_node, next.first + next.count, p->n);
        if (next.count && next.rows + rows > BLOCK) break;
        next.rows += rows;
        next.count++;
    }
    return next;
}

/* Goes through the graphs of a block: g, where its rows begin, and how many they are. */
#define EACH_GRAPH(p, here)                                                              \
    for (extent g = (here).first, at = 0, length;                                        \
         g < (here).first + (here).count && (length = count_nodes((p)->is_node, g, (p)->n), 1); \
         g++, at += length)

static void read_nodes(const network *p, block here, float *nodes) {
    EACH_GRAPH(p, here)
        multiply_on_bias(length, p->d, p->num_said, of_graph(p->said, p->num_said, g, p->n),
                         p->input, nodes + at * p->d, p->input_bias);
}

/* Message passing: every node is a neighbour of itself. */
static void pass_messages(const network *p, const perceptron *layer, block here,
                          const passed *found, float *nodes) {
    extent d = p->d, n = p->n;
    tanh_of(here.rows * d, nodes, found->active);
    memcpy(found->sums, found->active, here.rows * d * sizeof(float));
    EACH_GRAPH(p, here)
        multiply_on_itself(length, d, length, plain(p->adjacency + g * n * n, n),
                           found->active + at * d, found->sums + at * d);
    hidden_of(layer, here.rows, found->sums, found->hidden);
    result_of(layer, here.rows, found->hidden, nodes);
}

static void through_messages(const network *p, const perceptron *layer, block here,
                             const passed *found, float *of_hidden, float *of_sums,
                             float *gradient) {
    extent d = p->d, n = p->n;
    through_perceptron(layer, here.rows, gradient, found->sums, found->hidden, of_hidden, of_sums);
    memcpy(gradient, of_sums, here.rows * d * sizeof(float));
    EACH_GRAPH(p, here)
        multiply_on_itself(length, d, length, transposed(p->adjacency + g * n * n, n),
                           of_sums + at * d, gradient + at * d);
    through_tanh(here.rows * d, found->active, gradient);
}

static void write_tokens(const network *p, block here, const float *nodes, float *tokens,
                         float *sums) {
    extent d = p->d, e = p->e, n = p->n;
    EACH_GRAPH(p, here) {
        float *tokens_here = tokens + g * n * e;
        multiply_on_bias(length, e, d, plain(nodes + at * d, d), p->node_t, tokens_here, p->bias);
        multiply_on_itself(length, e, p->num_last, of_graph(p->last, p->num_last, g, n),
                           p->message, tokens_here);
        clear((n - length) * e, tokens_here + length * e);
        clear(d, sums + g * d);
        add_column_sums(length, d, nodes + at * d, sums + g * d);
    }
}

/* Gives memory for the weights, transposed, for what is computed of a block in the layers that are
   `kept`, and for `more` numbers. */
static float *begin_network(network *p, extent kept, extent more, const float *const *weights,
                            float *const *of_weights, passed **found, pieces *left) {
    extent d = p->d, e = p->e, f = p->f, most = p->n > BLOCK ? p->n : BLOCK;
    extent structs = p->layers * sizeof(perceptron) + kept * sizeof(passed);
    extent numbers = 2 * d * f * p->layers + most * (2 * d + f) * kept + (p->num_said + 1) * d +
                     (d + p->num_last) * e + more;
    float *memory = malloc(structs + numbers * sizeof(float));
    if (!memory) return NULL;
    p->layer = (perceptron *)memory;
    *found = (passed *)(p->layer + p->layers);
    left->next = (float *)(*found + kept);
    for (extent i = 0; i < p->layers; i++)
        p->layer[i] = layer_of(d, f, weights, of_weights, i, left);
    for (extent i = 0; i < kept; i++)
        (*found)[i] = (passed){piece(left, most * d), piece(left, most * d), piece(left, most * f)};
    float *input = piece(left, (p->num_said + 1) * d), *node_t = piece(left, d * e);
    float *message = piece(left, p->num_last * e);
    transpose(d, p->num_said + 1, p->input, input);
    transpose(e, d, p->node, node_t);
    transpose(e, p->num_last, p->message, message);
    p->input = input;
    p->input_bias = input + p->num_said * d;
    p->node_t = node_t;
    p->message = message;
    return memory;
}

int network_forward(extent layers, extent graphs, extent n, extent d, extent f, extent e,
                    extent num_said, extent num_last, const float *said, const float *adjacency,
                    const unsigned char *is_node, const float *last, const float *input,
                    const float *node, const float *bias, const float *message,
                    const float *const *weights, float *tokens, float *sums) {
    network p = {.layers = layers, .graphs = graphs, .n = n, .d = d, .f = f, .e = e,
                 .num_said = num_said, .num_last = num_last, .said = said,
                 .adjacency = adjacency, .last = last, .is_node = is_node, .input = input,
                 .node = node, .bias = bias, .message = message};
    extent most = n > BLOCK ? n : BLOCK;
    passed *found;
    pieces left;
    float *memory = begin_network(&p, 1, most * d, weights, NULL, &found, &left);
    if (!memory) return 1;
    float *nodes = piece(&left, most * d);
    block here = {0};
    while ((here = next_block(&p, here)).count) {
        read_nodes(&p, here, nodes);
        for (extent i = 0; i < layers; i++) pass_messages(&p, p.layer + i, here, found, nodes);
        write_tokens(&p, here, nodes, tokens, sums);
    }
    free(memory);
    return 0;
}

int network_backward(extent layers, extent graphs, extent n, extent d, extent f, extent e,
                     extent num_said, extent num_last, const float *of_tokens,
                     const float *of_node_sums, const float *said, const float *adjacency,
                     const unsigned char *is_node, const float *last, const float *input,
                     const float *node, const float *bias, const float *message,
                     const float *const *weights, float *of_input, float *of_node, float *of_bias,
                     float *of_message, float *const *of_weights) {
    network p = {.layers = layers, .graphs = graphs, .n = n, .d = d, .f = f, .e = e,
                 .num_said = num_said, .num_last = num_last, .said = said,
                 .adjacency = adjacency, .last = last, .is_node = is_node, .input = input,
                 .node = node, .bias = bias, .message = message};
    extent most = n > BLOCK ? n : BLOCK, in_size = (num_said + 1) * d;
    passed *found;
    pieces left;
    float *memory = begin_network(&p, layers, most * (2 * d + f) + in_size + num_last * e, weights,
                                  of_weights, &found, &left);
    if (!memory) return 1;
    float *nodes = piece(&left, most * d), *of_sums = piece(&left, most * d);
    float *of_hidden = piece(&left, most * f);
    float *of_input_t = piece(&left, in_size), *of_message_t = piece(&left, num_last * e);
    clear(in_size, of_input_t);
    clear(num_last * e, of_message_t);
    clear(e * d, of_node);
    clear(e, of_bias);
    block here = {0};
    while ((here = next_block(&p, here)).count) {
        read_nodes(&p, here, nodes);
        for (extent i = 0; i < layers; i++) pass_messages(&p, p.layer + i, here, found + i, nodes);
        EACH_GRAPH(&p, here) {
            const float *given = of_tokens + g * n * e;
            float *nodes_here = nodes + at * d;
            multiply_on_itself(e, d, length, transposed(given, e), nodes_here, of_node);
            multiply_on_itself(num_last, e, length, turned(of_graph(last, num_last, g, n)), given,
                               of_message_t);
            add_column_sums(length, e, given, of_bias);
            /* From here on they are derivatives. */
            multiply_on_bias(length, d, e, plain(given, e), node, nodes_here, of_node_sums + g * d);
        }
        for (extent i = layers; i--;)
            through_messages(&p, p.layer + i, here, found + i, of_hidden, of_sums, nodes);
        EACH_GRAPH(&p, here)
            multiply_on_itself(num_said, d, length, turned(of_graph(said, num_said, g, n)),
                               nodes + at * d, of_input_t);
        add_column_sums(here.rows, d, nodes, of_input_t + num_said * d);
    }
    transpose(num_said + 1, d, of_input_t, of_input);
    transpose(num_last, e, of_message_t, of_message);
    free(memory);
    return 0;
}

/* ---- the second half of a transformer's layer */

static void residual_of(const perceptron *p, extent rows, const float *x, float *hidden,
                        float *normed, float *scale) {
    hidden_of(p, rows, x, hidden);
    result_of(p, rows, hidden, normed);
    add(rows * p->width, x, normed);
    normalise(rows, p->width, normed, scale);
}

int residual_forward(extent rows, extent d, extent f, const float *x, const float *inner,
                     const float *inner_bias, const float *outer, const float *outer_bias,
                     const float *gain, const float *shift, float *result) {
    perceptron p = {d, f, inner, inner_bias, outer, outer_bias};
    norm after = {gain, shift};
    float *memory = malloc((2 * d * f + BLOCK * (d + f + 1)) * sizeof(float));
    if (!memory) return 1;
    pieces left = {memory};
    begin_forward(&p, &left);
    float *hidden = piece(&left, BLOCK * f), *normed = piece(&left, BLOCK * d);
    float *scale = piece(&left, BLOCK);
    for (extent first = 0; first < rows; first += BLOCK) {
        extent count = smaller(BLOCK, rows - first);
        residual_of(&p, count, x + first * d, hidden, normed, scale);
        weigh(&after, count, d, normed, result + first * d);
    }
    free(memory);
    return 0;
}

int residual_backward(extent rows, extent d, extent f, const float *gradient, const float *x,
                      const float *inner, const float *inner_bias, const float *outer,
                      const float *outer_bias, const float *gain, const float *shift,
                      float *of_x, float *of_inner, float *of_inner_bias, float *of_outer,
                      float *of_outer_bias, float *of_gain, float *of_shift) {
    perceptron p = {d, f, inner, inner_bias, outer, outer_bias, NULL, NULL,
                    of_inner, of_inner_bias, of_outer, of_outer_bias};
    norm after = {gain, shift, of_gain, of_shift};
    float *memory = malloc((2 * d * f + BLOCK * (2 * d + 2 * f + 1)) * sizeof(float));
    if (!memory) return 1;
    pieces left = {memory};
    begin_forward(&p, &left);
    begin_backward(&p);
    begin_norm(&after, d);
    float *hidden = piece(&left, BLOCK * f), *of_hidden = piece(&left, BLOCK * f);
    float *normed = piece(&left, BLOCK * d), *of_sums = piece(&left, BLOCK * d);
    float *scale = piece(&left, BLOCK);
    for (extent first = 0; first < rows; first += BLOCK) {
        extent count = smaller(BLOCK, rows - first);
        const float *here = x + first * d;
        residual_of(&p, count, here, hidden, normed, scale);
        through_norm(&after, count, d, gradient + first * d, normed, scale, of_sums);
        through_perceptron(&p, count, of_sums, here, hidden, of_hidden, of_x + first * d);
        add(count * d, of_sums, of_x + first * d);
    }
    free(memory);
    return 0;
}

/* ---- the first half of a transformer's layer */

#define NEVER_READ -3e38f

typedef struct {
    extent t, k, padded, d, j, q;
    const float *query, *query_bias, *output, *output_bias; /* [J, D], [J], [J, D], [D] */
    float *query_t;                                         /* transposed: [D, J] */
    /* Of a block of groups: keys as columns, what is added to scores, and what comes of them. */
    float *columns, *bias, *queries, *shares, *read, *normed, *scale;
} attention;

static extent attention_memory(const attention *p, extent at_once) {
    extent rows = at_once * p->t;
    return p->d * p->j + at_once * (p->d * p->padded + p->q * p->padded) + p->padded +
           rows * (2 * p->j + p->d + 1);
}

static void begin_attention(attention *p, extent at_once, pieces *left) {
    extent rows = at_once * p->t;
    p->query_t = piece(left, p->d * p->j);
    p->columns = piece(left, at_once * p->d * p->padded);
    p->shares = piece(left, at_once * p->q * p->padded);
    p->bias = piece(left, p->padded);
    p->queries = piece(left, rows * p->j);
    p->read = piece(left, rows * p->j);
    p->normed = piece(left, rows * p->d);
    p->scale = piece(left, rows);
    transpose(p->j, p->d, p->query, p->query_t);
    clear(at_once * p->d * p->padded, p->columns);
    for (extent i = p->k; i < p->padded; i++) p->bias[i] = NEVER_READ;
}

static void attend(const attention *p, extent groups, const float *tokens, const float *keys,
                   const float *mask) {
    extent rows = groups * p->t, d = p->d, of_group = p->t * p->j;
    multiply_on_bias(rows, p->j, d, plain(tokens, d), p->query_t, p->queries, p->query_bias);
    for (extent g = 0; g < groups; g++) {
        const float *keys_here = keys + g * p->k * d;
        float *columns = p->columns + g * d * p->padded, *shares = p->shares + g * p->q * p->padded;
        for (extent i = 0; i < d; i++)
            for (extent j = 0; j < p->k; j++) columns[i * p->padded + j] = keys_here[j * d + i];
        memcpy(p->bias, mask + g * p->k, p->k * sizeof(float));
        multiply_on_bias(p->q, p->padded, d, plain(p->queries + g * of_group, d), columns, shares,
                         p->bias);
        softmax(p->q, p->padded, shares);
        multiply(p->q, d, p->k, plain(shares, p->padded), keys_here, p->read + g * of_group);
    }
    multiply_on_bias(rows, d, p->j, plain(p->read, p->j), p->output, p->normed, p->output_bias);
    add(rows * d, tokens, p->normed);
    normalise(rows, d, p->normed, p->scale);
}

int attention_forward(extent groups, extent t, extent k, extent padded, extent d, extent j,
                      const float *tokens, const float *keys, const float *mask,
                      const float *query, const float *query_bias, const float *output,
                      const float *output_bias, const float *gain, const float *shift,
                      float *result) {
    attention p = {t, k, padded, d, j, t * j / d, query, query_bias, output, output_bias};
    norm after = {gain, shift};
    extent at_once = groups_at_once(groups, t);
    float *memory = malloc(attention_memory(&p, at_once) * sizeof(float));
    if (!memory) return 1;
    pieces left = {memory};
    begin_attention(&p, at_once, &left);
    for (extent first = 0; first < groups; first += at_once) {
        extent count = smaller(at_once, groups - first), before = first * t;
        attend(&p, count, tokens + before * d, keys + first * k * d, mask + first * k);
        weigh(&after, count * t, d, p.normed, result + before * d);
    }
    free(memory);
    return 0;
}

int attention_backward(extent groups, extent t, extent k, extent padded, extent d, extent j,
                       const float *gradient, const float *tokens, const float *keys,
                       const float *mask, const float *query, const float *query_bias,
                       const float *output, const float *output_bias, const float *gain,
                       const float *shift, float *of_tokens, float *of_keys, float *of_query,
                       float *of_query_bias, float *of_output, float *of_output_bias,
                       float *of_gain, float *of_shift) {
    attention p = {t, k, padded, d, j, t * j / d, query, query_bias, output, output_bias};
    norm after = {gain, shift, of_gain, of_shift};
    extent at_once = groups_at_once(groups, t), most = at_once * t;
    extent size = attention_memory(&p, at_once) + d * j + most * (d + 2 * j) + p.q * padded;
    float *memory = malloc(size * sizeof(float));
    if (!memory) return 1;
    pieces left = {memory};
    begin_attention(&p, at_once, &left);
    float *output_t = piece(&left, d * j), *of_sums = piece(&left, most * d);
    float *of_read = piece(&left, most * j), *of_queries = piece(&left, most * j);
    float *of_scores = piece(&left, p.q * padded);
    transpose(j, d, output, output_t);
    clear(d * j, of_query);
    clear(j, of_query_bias);
    clear(d * j, of_output);
    clear(d, of_output_bias);
    begin_norm(&after, d);
    for (extent first = 0; first < groups; first += at_once) {
        extent count = smaller(at_once, groups - first), rows = count * t;
        const float *tokens_here = tokens + first * t * d;
        float *of_tokens_here = of_tokens + first * t * d;
        attend(&p, count, tokens_here, keys + first * k * d, mask + first * k);
        through_norm(&after, rows, d, gradient + first * t * d, p.normed, p.scale, of_sums);
        multiply(rows, j, d, plain(of_sums, d), output_t, of_read);
        for (extent g = 0; g < count; g++) {
            const float *keys_here = keys + (first + g) * k * d;
            const float *shares = p.shares + g * p.q * padded, *of_read_here = of_read + g * t * j;
            float *of_keys_here = of_keys + (first + g) * k * d;
            multiply(p.q, padded, d, plain(of_read_here, d), p.columns + g * d * padded, of_scores);
            through_softmax(p.q, padded, shares, of_scores);
            multiply(k, d, p.q, transposed(shares, padded), of_read_here, of_keys_here);
            multiply_on_itself(k, d, p.q, transposed(of_scores, padded), p.queries + g * t * j,
                               of_keys_here);
            multiply(p.q, d, k, plain(of_scores, padded), keys_here, of_queries + g * t * j);
        }
        multiply(rows, d, j, plain(of_queries, j), query, of_tokens_here);
        add(rows * d, of_sums, of_tokens_here);
        multiply_on_itself(j, d, rows, transposed(of_queries, j), tokens_here, of_query);
        multiply_on_itself(j, d, rows, transposed(p.read, j), of_sums, of_output);
        add_column_sums(rows, j, of_queries, of_query_bias);
        add_column_sums(rows, d, of_sums, of_output_bias);
    }
    free(memory);
    return 0;
}
