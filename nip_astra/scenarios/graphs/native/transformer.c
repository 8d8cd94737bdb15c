/* A transformer's layer for pairs of graphs, attention and a perceptron, in one pass over blocks of
   tokens that stay in the cache.

   Called from native_layers.py; the formula stands in formulas.py. Each function gives 0,
   or 1 where memory is lacking. Widths D and F are multiples of 16.

   Shapes: B frames, n nodes of a graph (padded), D width, F hidden width, H heads, J = H D. */

#include "layers.h"

#define NEVER_READ -3e38f
#define MOST_GROUPS 8

enum whose { OF_GRAPHS, OF_NODES };

/* Weights in the order of formulas.py, or their derivatives. A head has D / H rows of the first
   three matrices, and columns of the fourth. */
enum weight {
    QUERY, QUERY_BIAS, KEY, VALUE, OUTPUT, OUTPUT_BIAS, GAIN, SHIFT,
    INNER, INNER_BIAS, OUTER, OUTER_BIAS, LAST_GAIN, LAST_SHIFT
};

/* Tokens that read the same keys: the graphs of a frame, or the nodes of a graph. Keys are the
   nodes of the other graph, or of both, and the graphs of the frame. Padding is left out. */
typedef struct {
    extent own, rows;                            /* where its tokens begin, and how many they are */
    extent first, num_first, second, num_second; /* nodes that are keys */
    extent graphs;
    extent at; /* where its rows begin in the block */
} group;

typedef struct {
    extent whose, frames, n, d, heads, f;
    const float *graphs, *nodes;  /* [B, 2, D], [B, 2, n, D] */
    const unsigned char *is_node; /* [B, 2, n] */
    const float *const *weights;

    /* Products of a head's matrices: keys and values are then the tokens themselves. */
    extent j, of_head;            /* numbers of all queries of a token, and of a head's matrix */
    float root;                   /* what scores are divided by */
    float *scaled_key, *output_t; /* [D, D] */
    float *query, *query_t, *query_bias, *read_out; /* [J, D], [D, J], [J], [J, D] */
    perceptron perceptron;
    norm norm, last_norm;

    /* Of a block. */
    extent most_keys, padded, count, rows;
    group groups[MOST_GROUPS];
    float *x, *keys, *columns, *bias, *queries, *shares, *read, *normed, *scale, *attended;
    float *hidden, *last_normed, *last_scale;
} transformer;

static extent num_keys(const group *g) { return g->num_first + g->num_second + 2; }

static group group_of(const transformer *p, extent i) {
    extent frame = p->whose == OF_NODES ? i / 2 : i, side = p->whose == OF_NODES ? i % 2 : 0;
    extent own = 2 * frame + side, other = 2 * frame + !side, size = p->n * p->d;
    group g = {.own = own * size, .rows = count_nodes(p->is_node, own, p->n),
               .first = other * size, .num_first = count_nodes(p->is_node, other, p->n),
               .graphs = 2 * frame * p->d};
    if (p->whose == OF_GRAPHS) {
        g.second = g.own;
        g.num_second = g.rows;
        g.own = g.graphs;
        g.rows = 2;
    }
    return g;
}

/* Takes groups from number `next` on, and says whether there was one. */
static int take_groups(transformer *p, extent next) {
    extent total = p->whose == OF_NODES ? 2 * p->frames : p->frames;
    p->count = p->rows = 0;
    while (p->count < MOST_GROUPS && next + p->count < total) {
        group g = group_of(p, next + p->count);
        if (p->count && p->rows + g.rows > BLOCK) break;
        g.at = p->rows;
        p->groups[p->count++] = g;
        p->rows += g.rows;
    }
    return p->count > 0;
}

static extent rows_of_result(const transformer *p) { return p->whose == OF_GRAPHS ? 2 : p->n; }

static void read_tokens(transformer *p) {
    extent d = p->d;
    const float *own = p->whose == OF_GRAPHS ? p->graphs : p->nodes;
    for (extent i = 0; i < p->count; i++) {
        const group *g = p->groups + i;
        extent count = num_keys(g);
        float *keys = p->keys + i * p->most_keys * d, *columns = p->columns + i * d * p->padded;
        copy(g->rows * d, own + g->own, p->x + g->at * d);
        copy(g->num_first * d, p->nodes + g->first, keys);
        copy(g->num_second * d, p->nodes + g->second, keys + g->num_first * d);
        copy(2 * d, p->graphs + g->graphs, keys + (count - 2) * d);
        for (extent k = 0; k < d; k++) {
            for (extent m = 0; m < count; m++) columns[k * p->padded + m] = keys[m * d + k];
            clear(p->padded - count, columns + k * p->padded + count);
        }
    }
}

static void transform(transformer *p) {
    extent d = p->d, j = p->j, padded = p->padded, rows = p->rows;
    read_tokens(p);
    multiply_on_bias(rows, j, d, plain(p->x, d), p->query_t, p->queries, p->query_bias);
    for (extent i = 0; i < p->count; i++) {
        const group *g = p->groups + i;
        extent queries = g->rows * p->heads, at = g->at * p->heads, count = num_keys(g);
        float *shares = p->shares + at * padded;
        for (extent m = 0; m < padded; m++) p->bias[m] = m < count ? 0 : NEVER_READ;
        multiply_on_bias(queries, padded, d, plain(p->queries + at * d, d),
                         p->columns + i * d * padded, shares, p->bias);
        softmax(queries, padded, shares);
        multiply(queries, d, count, plain(shares, padded), p->keys + i * p->most_keys * d,
                 p->read + at * d);
    }
    multiply_on_bias(rows, d, j, plain(p->read, j), p->read_out, p->normed,
                     p->weights[OUTPUT_BIAS]);
    add(rows * d, p->x, p->normed);
    normalise(rows, d, p->normed, p->scale);
    weigh(&p->norm, rows, d, p->normed, p->attended);
    hidden_of(&p->perceptron, rows, p->attended, p->hidden);
    result_of(&p->perceptron, rows, p->hidden, p->last_normed);
    add(rows * d, p->attended, p->last_normed);
    normalise(rows, d, p->last_normed, p->last_scale);
}

/* Gives memory for products of weights, a block, and `more` numbers. Derivatives that are asked for
   become 0. */
static float *begin_transformer(transformer *p, float *const *of_weights, extent more,
                                pieces *left) {
    extent d = p->d, f = p->f, j = p->j = p->heads * d, rows = p->n > BLOCK ? p->n : BLOCK;
    p->most_keys = (p->whose == OF_GRAPHS ? 2 : 1) * p->n + 2;
    p->padded = (p->most_keys + TILE - 1) / TILE * TILE;
    p->of_head = d / p->heads * d;
    p->root = sqrtf((float)(d / p->heads));
    extent of_keys = MOST_GROUPS * d * (p->most_keys + p->padded) + p->padded;
    float *memory = malloc((2 * d * (d + f) + 3 * d * j + j + of_keys + more +
                            rows * (4 * d + 2 * j + f + p->heads * p->padded + 2)) * sizeof(float));
    if (!memory) return NULL;
    *left = (pieces){memory};
    const float *const *w = p->weights;
    p->perceptron = perceptron_of(d, f, w + INNER, of_weights ? of_weights + INNER : NULL, left);
    p->norm = norm_of(d, w + GAIN, of_weights ? of_weights + GAIN : NULL);
    p->last_norm = norm_of(d, w + LAST_GAIN, of_weights ? of_weights + LAST_GAIN : NULL);
    p->scaled_key = piece(left, d * d);
    p->output_t = piece(left, d * d);
    p->query = piece(left, j * d);
    p->query_t = piece(left, j * d);
    p->query_bias = piece(left, j);
    p->read_out = piece(left, j * d);
    p->keys = piece(left, MOST_GROUPS * d * p->most_keys);
    p->columns = piece(left, MOST_GROUPS * d * p->padded);
    p->bias = piece(left, p->padded);
    p->x = piece(left, rows * d);
    p->normed = piece(left, rows * d);
    p->attended = piece(left, rows * d);
    p->last_normed = piece(left, rows * d);
    p->queries = piece(left, rows * j);
    p->read = piece(left, rows * j);
    p->shares = piece(left, rows * p->heads * p->padded);
    p->hidden = piece(left, rows * f);
    p->scale = piece(left, rows);
    p->last_scale = piece(left, rows);

    for (extent i = 0; i < d * d; i++) p->scaled_key[i] = w[KEY][i] / p->root;
    transpose(d, d, w[OUTPUT], p->output_t);
    for (extent h = 0, of_head = p->of_head; h < p->heads; h++) {
        const float *key = p->scaled_key + h * of_head, *bias = w[QUERY_BIAS] + h * (d / p->heads);
        multiply(d, d, d / p->heads, transposed(key, d), w[QUERY] + h * of_head,
                 p->query + h * d * d);
        multiply(1, d, d / p->heads, plain(bias, 0), key, p->query_bias + h * d);
        multiply(d, d, d / p->heads, transposed(w[VALUE] + h * of_head, d),
                 p->output_t + h * of_head, p->read_out + h * d * d);
    }
    transpose(j, d, p->query, p->query_t);
    return memory;
}

int transformer_forward(extent whose, extent frames, extent n, extent d, extent heads, extent f,
                        const float *graphs, const float *nodes, const unsigned char *is_node,
                        const float *const *weights, float *result) {
    transformer p = {.whose = whose, .frames = frames, .n = n, .d = d, .heads = heads, .f = f,
                     .graphs = graphs, .nodes = nodes, .is_node = is_node, .weights = weights};
    pieces left;
    extent rows = n > BLOCK ? n : BLOCK, of_group = rows_of_result(&p) * d;
    float *memory = begin_transformer(&p, NULL, rows * d, &left);
    if (!memory) return 1;
    float *tokens = piece(&left, rows * d);
    for (extent next = 0; take_groups(&p, next); next += p.count) {
        transform(&p);
        weigh(&p.last_norm, p.rows, d, p.last_normed, tokens);
        for (extent i = 0; i < p.count; i++, result += of_group) {
            extent size = p.groups[i].rows * d;
            copy(size, tokens + p.groups[i].at * d, result);
            clear(of_group - size, result + size);
        }
    }
    free(memory);
    return 0;
}

/* The derivatives of a head's matrices from those of their products. */
static void through_products(const transformer *p, const float *of_query, const float *of_bias,
                             const float *of_read_out, float *const *of_weights, float *turned_over,
                             float *of_output_t) {
    extent d = p->d, of_head = p->of_head, width = d / p->heads;
    for (extent h = 0; h < p->heads; h++) {
        extent at = h * of_head;
        const float *bias = p->weights[QUERY_BIAS] + h * width, *of_bias_here = of_bias + h * d;
        float *of_key = of_weights[KEY] + at;
        const float *of_product = of_query + h * d * d;
        multiply(width, d, d, plain(p->scaled_key + at, d), of_product, of_weights[QUERY] + at);
        for (extent k = 0; k < width; k++) {
            float total = 0;
            for (extent i = 0; i < d; i++) total += p->scaled_key[at + k * d + i] * of_bias_here[i];
            of_weights[QUERY_BIAS][h * width + k] = total;
        }
        transpose(d, d, of_product, turned_over);
        multiply(width, d, d, plain(p->weights[QUERY] + at, d), turned_over, of_key);
        multiply_on_itself(width, d, 1, plain(bias, 1), of_bias_here, of_key);
        for (extent i = 0; i < of_head; i++) of_key[i] /= p->root;

        of_product = of_read_out + h * d * d;
        multiply(width, d, d, plain(p->weights[VALUE] + at, d), of_product, of_output_t + at);
        transpose(d, d, of_product, turned_over);
        multiply(width, d, d, plain(p->output_t + at, d), turned_over, of_weights[VALUE] + at);
    }
    transpose(d, d, of_output_t, of_weights[OUTPUT]);
}

int transformer_backward(extent whose, extent frames, extent n, extent d, extent heads, extent f,
                         const float *gradient, const float *graphs, const float *nodes,
                         const unsigned char *is_node, const float *const *weights,
                         float *of_graphs, float *of_nodes, float *const *of_weights) {
    transformer p = {.whose = whose, .frames = frames, .n = n, .d = d, .heads = heads, .f = f,
                     .graphs = graphs, .nodes = nodes, .is_node = is_node, .weights = weights};
    extent j = heads * d, rows = n > BLOCK ? n : BLOCK, of_group = rows_of_result(&p) * d;
    extent most_keys = 2 * n + 2, padded = (most_keys + TILE - 1) / TILE * TILE;
    extent of_block = rows * (3 * d + f + 2 * j + heads * padded) + most_keys * d;
    pieces left;
    float *memory = begin_transformer(&p, of_weights, of_block + 3 * d * j + j + 2 * d * d,
                                      &left);
    if (!memory) return 1;
    padded = p.padded;
    float *given = piece(&left, rows * d), *of_sums = piece(&left, rows * d);
    float *of_x = piece(&left, rows * d), *of_hidden = piece(&left, rows * f);
    float *of_read = piece(&left, rows * j), *of_queries = piece(&left, rows * j);
    float *of_scores = piece(&left, rows * heads * padded), *of_keys = piece(&left, most_keys * d);
    float *read_out_t = piece(&left, d * j), *of_query = piece(&left, d * j);
    float *of_read_out = piece(&left, d * j), *of_query_bias = piece(&left, j);
    float *of_output_t = piece(&left, d * d), *turned_over = piece(&left, d * d);
    float *of_own = whose == OF_GRAPHS ? of_graphs : of_nodes;
    transpose(j, d, p.read_out, read_out_t);
    clear(d * j, of_query);
    clear(d * j, of_read_out);
    clear(j, of_query_bias);
    clear(d, of_weights[OUTPUT_BIAS]);
    clear(frames * 2 * d, of_graphs);
    clear(frames * 2 * n * d, of_nodes);
    for (extent next = 0; take_groups(&p, next); next += p.count) {
        for (extent i = 0; i < p.count; i++, gradient += of_group)
            copy(p.groups[i].rows * d, gradient, given + p.groups[i].at * d);
        transform(&p);
        through_norm(&p.last_norm, p.rows, d, given, p.last_normed, p.last_scale, of_sums);
        through_perceptron(&p.perceptron, p.rows, of_sums, p.attended, p.hidden, of_hidden, given);
        add(p.rows * d, of_sums, given);
        through_norm(&p.norm, p.rows, d, given, p.normed, p.scale, of_sums);
        multiply(p.rows, j, d, plain(of_sums, d), read_out_t, of_read);
        for (extent i = 0; i < p.count; i++) {
            const group *g = p.groups + i;
            extent queries = g->rows * heads, at = g->at * heads, count = num_keys(g);
            const float *shares = p.shares + at * padded;
            multiply(queries, padded, d, plain(of_read + at * d, d), p.columns + i * d * padded,
                     of_scores);
            through_softmax(queries, padded, shares, of_scores);
            multiply(count, d, queries, transposed(shares, padded), of_read + at * d, of_keys);
            multiply_on_itself(count, d, queries, transposed(of_scores, padded),
                               p.queries + at * d, of_keys);
            multiply(queries, d, count, plain(of_scores, padded), p.keys + i * p.most_keys * d,
                     of_queries + at * d);
            add(g->num_first * d, of_keys, of_nodes + g->first);
            add(g->num_second * d, of_keys + g->num_first * d, of_nodes + g->second);
            add(2 * d, of_keys + (count - 2) * d, of_graphs + g->graphs);
        }
        multiply(p.rows, d, j, plain(of_queries, j), p.query, of_x);
        add(p.rows * d, of_sums, of_x);
        for (extent i = 0; i < p.count; i++) {
            const group *g = p.groups + i;
            add(g->rows * d, of_x + g->at * d, of_own + g->own);
        }
        multiply_on_itself(j, d, p.rows, transposed(of_queries, j), p.x, of_query);
        multiply_on_itself(j, d, p.rows, transposed(p.read, j), of_sums, of_read_out);
        add_column_sums(p.rows, j, of_queries, of_query_bias);
        add_column_sums(p.rows, d, of_sums, of_weights[OUTPUT_BIAS]);
    }
    through_products(&p, of_query, of_query_bias, of_read_out, of_weights, turned_over,
                     of_output_t);
    free(memory);
    return 0;
}
