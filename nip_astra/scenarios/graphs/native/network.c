/* A network of small graphs in one pass over blocks of graphs that stay in the cache.

   Called from native_layers.py; the formula stands in formulas.py. Each function gives 0, or 1
   where memory is lacking. Widths D, E and F are multiples of 16.

   Shapes: B frames, G = 2 B graphs, n nodes (padded), D width, E width of a token, F hidden
   width. */

#include "layers.h"

/* Graphs whose nodes are computed at once: those of padding, which come last, are left out. */
typedef struct {
    extent first, count, rows, before; /* `before`: rows of all blocks before it */
} block;

/* What the network reads of frames, and its weights. Graph g is half g % 2 of frame g / 2. */
typedef struct {
    extent layers, graphs, n, d, f, e, num_sent, num_last;
    const float *sent, *adjacency, *last; /* [B, num_sent, 2 n], [G, n, n], [B, num_last, 2 n] */
    const unsigned char *is_node;         /* [G, n] */
    const float *input, *input_bias;      /* [num_sent, D], [D] */
    const float *node, *node_t, *bias;    /* [E, D], [D, E], [E] */
    const float *message;                 /* [num_last, E] */
    perceptron *layer;
} network;

/* One number of each node of a graph, a row, from what is there of all numbers and both graphs. */
static matrix of_graph(const float *sent, extent count, extent g, extent n) {
    return (matrix){sent + (g / 2) * count * 2 * n + (g % 2) * n, 1, 2 * n};
}

static matrix turned(matrix a) { return (matrix){a.at, a.column, a.row}; }

static block next_block(const network *p, block last) {
    block next = {last.first + last.count, 0, 0, last.before + last.rows};
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
        multiply_on_bias(length, p->d, p->num_sent, of_graph(p->sent, p->num_sent, g, p->n),
                         p->input, nodes + at * p->d, p->input_bias);
}

/* Message passing: every node is a neighbour of itself. */
static void pass_messages(const network *p, const perceptron *layer, block here,
                          const float *active, float *sums, float *hidden) {
    extent d = p->d, n = p->n;
    copy(here.rows * d, active, sums);
    EACH_GRAPH(p, here)
        multiply_on_itself(length, d, length, plain(p->adjacency + g * n * n, n), active + at * d,
                           sums + at * d);
    hidden_of(layer, here.rows, sums, hidden);
}

/* What of a block is kept for derivatives: of each layer the nodes' hyperbolic tangents, which
   pass_messages takes, and the nodes after all layers. */
static float *kept_of(const network *p, block here, extent layer, float *kept) {
    return kept + (layer * p->graphs * p->n + here.before) * p->d;
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

/* Gives memory for the weights, transposed, and for `more` numbers. */
static float *begin_network(network *p, extent more, const float *const *weights,
                            float *const *of_weights, pieces *left) {
    extent d = p->d, e = p->e, f = p->f, structs = p->layers * sizeof(perceptron);
    extent numbers = 2 * d * f * p->layers + (p->num_sent + 1) * d + (d + p->num_last) * e + more;
    float *memory = malloc(structs + numbers * sizeof(float));
    if (!memory) return NULL;
    p->layer = (perceptron *)memory;
    left->next = (float *)(p->layer + p->layers);
    for (extent i = 0; i < p->layers; i++)
        p->layer[i] = perceptron_of(d, f, weights + 4 * i, of_weights ? of_weights + 4 * i : NULL,
                                    left);
    float *input = piece(left, (p->num_sent + 1) * d), *node_t = piece(left, d * e);
    float *message = piece(left, p->num_last * e);
    transpose(d, p->num_sent + 1, p->input, input);
    transpose(e, d, p->node, node_t);
    transpose(e, p->num_last, p->message, message);
    p->input = input;
    p->input_bias = input + p->num_sent * d;
    p->node_t = node_t;
    p->message = message;
    return memory;
}

int network_forward(extent layers, extent graphs, extent n, extent d, extent f, extent e,
                    extent num_sent, extent num_last, const float *sent, const float *adjacency,
                    const unsigned char *is_node, const float *last, const float *input,
                    const float *node, const float *bias, const float *message,
                    const float *const *weights, float *kept, float *tokens, float *sums_of_nodes) {
    network p = {.layers = layers, .graphs = graphs, .n = n, .d = d, .f = f, .e = e,
                 .num_sent = num_sent, .num_last = num_last, .sent = sent,
                 .adjacency = adjacency, .last = last, .is_node = is_node, .input = input,
                 .node = node, .bias = bias, .message = message};
    extent most = n > BLOCK ? n : BLOCK;
    pieces left;
    float *memory = begin_network(&p, most * (3 * d + f), weights, NULL, &left);
    if (!memory) return 1;
    float *nodes = piece(&left, most * d), *own = piece(&left, most * d);
    float *sums = piece(&left, most * d), *hidden = piece(&left, most * f);
    block here = {0};
    while ((here = next_block(&p, here)).count) {
        extent size = here.rows * d;
        read_nodes(&p, here, nodes);
        for (extent i = 0; i < layers; i++) {
            float *active = kept ? kept_of(&p, here, i, kept) : own;
            tanh_of(size, nodes, active);
            pass_messages(&p, p.layer + i, here, active, sums, hidden);
            result_of(p.layer + i, here.rows, hidden, nodes);
        }
        if (kept) copy(size, nodes, kept_of(&p, here, layers, kept));
        write_tokens(&p, here, nodes, tokens, sums_of_nodes);
    }
    free(memory);
    return 0;
}

int network_backward(extent layers, extent graphs, extent n, extent d, extent f, extent e,
                     extent num_sent, extent num_last, const float *of_tokens,
                     const float *of_node_sums, const float *sent, const float *adjacency,
                     const unsigned char *is_node, const float *last, const float *input,
                     const float *node, const float *bias, const float *message,
                     const float *const *weights, float *kept, float *of_input, float *of_node,
                     float *of_bias, float *of_message, float *const *of_weights) {
    network p = {.layers = layers, .graphs = graphs, .n = n, .d = d, .f = f, .e = e,
                 .num_sent = num_sent, .num_last = num_last, .sent = sent,
                 .adjacency = adjacency, .last = last, .is_node = is_node, .input = input,
                 .node = node, .bias = bias, .message = message};
    extent most = n > BLOCK ? n : BLOCK, in_size = (num_sent + 1) * d;
    pieces left;
    float *memory = begin_network(&p, most * (3 * d + 2 * f) + in_size + num_last * e, weights,
                                  of_weights, &left);
    if (!memory) return 1;
    float *gradient = piece(&left, most * d), *sums = piece(&left, most * d);
    float *of_sums = piece(&left, most * d), *hidden = piece(&left, most * f);
    float *of_hidden = piece(&left, most * f);
    float *of_input_t = piece(&left, in_size), *of_message_t = piece(&left, num_last * e);
    clear(in_size, of_input_t);
    clear(num_last * e, of_message_t);
    clear(e * d, of_node);
    clear(e, of_bias);
    block here = {0};
    while ((here = next_block(&p, here)).count) {
        const float *nodes = kept_of(&p, here, layers, kept);
        EACH_GRAPH(&p, here) {
            const float *given = of_tokens + g * n * e;
            multiply_on_itself(e, d, length, transposed(given, e), nodes + at * d, of_node);
            multiply_on_itself(num_last, e, length, turned(of_graph(last, num_last, g, n)), given,
                               of_message_t);
            add_column_sums(length, e, given, of_bias);
            multiply_on_bias(length, d, e, plain(given, e), node, gradient + at * d,
                             of_node_sums + g * d);
        }
        for (extent i = layers; i--;) {
            const float *active = kept_of(&p, here, i, kept);
            pass_messages(&p, p.layer + i, here, active, sums, hidden);
            through_perceptron(p.layer + i, here.rows, gradient, sums, hidden, of_hidden, of_sums);
            copy(here.rows * d, of_sums, gradient);
            EACH_GRAPH(&p, here)
                multiply_on_itself(length, d, length, transposed(adjacency + g * n * n, n),
                                   of_sums + at * d, gradient + at * d);
            through_tanh(here.rows * d, active, gradient);
        }
        EACH_GRAPH(&p, here)
            multiply_on_itself(num_sent, d, length, turned(of_graph(sent, num_sent, g, n)),
                               gradient + at * d, of_input_t);
        add_column_sums(here.rows, d, gradient, of_input_t + num_sent * d);
    }
    transpose(num_sent + 1, d, of_input_t, of_input);
    transpose(num_last, e, of_message_t, of_message);
    free(memory);
    return 0;
}
