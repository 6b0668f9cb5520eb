// Structs, constants and functions of cpu.c that Python uses. backends/cpu_library.py reads them from
// this file, so each declaration is `type name, *name;` without arrays or nested structs.
//
// Letters: B sequences, T tokens or nodes of each, M = B * T rows, S cache capacity, V vocabulary,
// C hidden size, Hq and Hkv query and key/value heads, G = Hq / Hkv, D head size.

enum { FLOAT32, BFLOAT16, INT8, INT4, INT5, INT6 };  // kinds of a weight's numbers

// What `pack_rows` reads. RAW_FLOATS: numbers of the weight's own kind. RAW_BYTES: its quantized
// numbers, one per byte, without scales. The others are llama.cpp's types, numbered as in ggml.h.
enum { RAW_FLOATS = -2, RAW_BYTES = -1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12,
       Q5_K = 13, Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23 };

enum { NO_MIX, ATTENTION, CONCAT, LAYER };  // how draft heads mix tokens into states

typedef struct Linear {          // a weight [n, k] in the layout described at `product`
    int32_t kind, n, k;
    int32_t group, half;         // inputs that share a scale; whether scales are float16 or float32
    int32_t zero;                // subtracted from each number of 4, 5 or 6 bits (of 6: 32)
    void *values, *scales, *minimums;  // scales, minimums: [n / LANES][k / group][LANES], or NULL
    void *tops;                  // float16 factors of int8 scales and minimums, or NULL
    const float *bias;           // [n], or NULL
    const struct Linear *next;   // weight of the outputs that follow, or NULL
} Linear;

typedef struct NormWeights {
    const float *weight, *bias;  // weight NULL: no norm; bias NULL: RMSNorm, else LayerNorm
    float eps;
} NormWeights;

typedef struct BlockWeights {    // a model.Block
    NormWeights attn_norm, attn_post_norm, mlp_norm, mlp_post_norm, q_norm, k_norm;
    Linear qkv, proj, up, down;
    int32_t n_embd, n_head, n_kv_head, head_size, n_inner;
    int32_t norms_all;           // q_norm and k_norm span all heads
    int32_t gated, gelu, window, rope;  // window 0: none; rope: 0 or 1 for the pass's table, or -1
    int32_t attn_gate;           // qkv begins with gates of the attention's output
    float scale;                 // of attention scores
    Linear qkvz, ab, out_proj;   // of a recurrent.layers.GatedDelta in place of attention
    NormWeights norm;
    const float *conv;           // [n, C], for the newest input first; NULL: attention
    const float *A, *dt_bias;    // [H]
} BlockWeights;

typedef struct DeltaStates {     // a cpu_layers.PackedStates; letters as in recurrent/delta.py
    int32_t n_head, n_key_head, key_size, value_size, window;  // H, Hk, Dk, Dv, n
    int32_t slots, nodes;        // N
    int32_t layer;               // the first one that runs, of all
    float *state, *history;      // [layers, slots, H, Dk, Dv], [layers, slots, n - 1, C]
    float *inputs, *keys, *u, *decay;  // [layers, slots, N, ...], by the step's row and node
} DeltaStates;

typedef struct Pass {            // a forward pass: what its blocks share
    int32_t B, T, threads, bfloat16;  // bfloat16: dtype of keys, values and rope, else float32
    int32_t rows, rope_rows;     // of the cache, S, and of a rope table
    const int32_t *slots;        // [B]: indices of the sequences in lengths and kv; NULL: 0, 1, ...
    const int32_t *lengths;      // rows in the cache before these tokens, by slot
    const int64_t *ancestors;    // [B, T] bitmasks of tree nodes; NULL: tokens of a prompt
    const int64_t *positions;    // [B, T]
    const void *rope, *own_rope; // [rope_rows, 2, D]: cosine, signed sine; or NULL
    const float *slopes;         // [Hq] of ALiBi, or NULL
    void *kv;                    // keys and values of a layer, [2, B, Hkv, S, D]
    int64_t layer_stride, value_stride, batch_stride, head_stride;  // in numbers
    DeltaStates states;          // of the other layers
    int32_t first;               // tokens begin at rows lengths + first; bits count from lengths
} Pass;

typedef struct HeadWeights {     // a draft head
    NormWeights norm, embed_norm;  // of the state before mixing; of e before a LAYER
    Linear mix, key_value;       // Wq, [Wk, Wv]; or W of [norm(s), e]; or a LAYER's, k = 0: none
    Linear project;
} HeadWeights;

typedef struct Heads {
    int32_t n_embd, n_head, n_weights, mix, linear;  // linear: z = W [s, e] + b
    int32_t norm_before_residual, norm_output;  // see drafters.base.Eagle3Config
    float scale;                 // of e
    const HeadWeights *heads;    // [n_weights]; the last one serves all further depths
    const HeadWeights *mix_in;   // mixes tokens in before the augmenting blocks, or NULL
    NormWeights norm, state_norm;  // state_norm: of the states that the heads draft from
    Linear rows, table;          // LM head for the draft vocabulary; e is a row of the table
    const int32_t *ids;          // token ids of the draft vocabulary; NULL: 0, 1, ...
} Heads;

typedef struct Step {            // a decoding step of the sequences in some of the slots
    Linear embed;                // k = 0: the caller embeds the tokens
    const BlockWeights *blocks;
    NormWeights norm;
    Linear head;
    const Heads *heads;          // or NULL
    const BlockWeights *augment;
    int32_t n_blocks, n_augment;
    int32_t n_delta;             // blocks with gated delta layers
    int32_t K, W, with_lookup;   // with_lookup: whether lookup drafts
    int32_t words;               // of a mask: ceil(V / 32)
    const float *chances;        // [2, SOURCES]: see generate.Policy, as counts and seconds
    double *counts;              // [2, SOURCES, 2]
    const float *seconds;        // [LARGEST + 1] of a step with T nodes
    Pass trees, paths;           // over the model's cache, over the augmenting blocks' cache
    int32_t *lengths, *heads_lengths;  // of these caches, by slot, like all down to `hidden_rows`
    int32_t *history;            // [slots, history_stride]
    int32_t *active;             // 0: an idle slot
    int64_t *root, *sequence, *seed;
    int64_t history_stride, hidden_stride;
    float *temperature;
    void *state;                 // [slots, C]: what the heads draft from, float32 or bfloat16
    void *hidden_rows;           // [slots, hidden_stride]: hidden states of committed rows
    int32_t tree_size, depths, noise;  // requested: T, or 0 to choose it by `seconds`; heads to run
    int32_t T, P;                // set by `step_draft`, as `drafted`
    float *drafted;              // [2]: expected tokens, committed rows that heads had not read
    int64_t *tree;               // [5, B, T]: tokens, parents, depths, ancestors, sources
    float *probabilities;        // [B, T]
    int64_t *chain;              // [B, 1 + MAX_CHAIN]: lookup's match length and tokens
    const int64_t *forced;       // [B, 1 + MAX_CHAIN]: 0, or SCHEMA and forced text, then -1; or NULL
    const int32_t *first_masks, *masks;  // [B, words], [B, T, words]; NULL: allow all
    int64_t *positions, *target; // [B, T]
    int64_t *accepted;           // [B, 3 P + 2]
    float *x, *normed;           // [B, T, C]: the residual stream, its norm
    uint16_t *hidden;            // [B, T, C]: the stream in bfloat16, or NULL
    const int32_t *stops;        // numbers of blocks after which heads read the stream, then n_blocks
    void *states;                // [stops, B, T, C]: the stream there; NULL: heads read `hidden`
} Step;

extern const int32_t lanes;      // LANES: outputs that a packed weight interleaves

void pack_rows(const Linear *w, int type, const uint8_t *rows, int64_t stride, const int64_t *order,
               int threads);
void product(const Linear *w, const float *x, int M, float *out, int threads);
int unpack_rows(const Linear *weights, const int64_t *rows, int count, float *out);
void attention(const BlockWeights *block, const Pass *pass, float *q, float *out);
void commit_delta(const Pass *pass, int layers, const int64_t *path, const int64_t *count,
                  int stride);
int run_blocks(const BlockWeights *blocks, int count, const NormWeights *last, Pass *pass, float *x,
               float *normed);
void sample(const Linear *w, const float *x, int M, int T, const int32_t *slots,
            const float *temperature, const int64_t *seed, const int64_t *sequence,
            const int64_t *position, const int32_t *masks, int64_t *out, int threads);
void run_draft_head(const Heads *h, int number, float *state, const int64_t *tokens, int M,
                    float *normed, int threads);
int step_draft(Step *s);
int step_verify(Step *s);
void step_sample(Step *s);
void step_accept(Step *s);
void step_commit(Step *s);
