// CPU kernels, the counterpart of the Triton kernels in kernels.py; compiled by cpu_library.py.
//
//     pack_rows     packs a weight of 32, 16, 8, 6, 5 or 4 bits from a file's rows
//     product       rows times a packed weight
//     unpack_rows   rows of a packed weight: embedding lookup
//     add_norm      residual add, then RMSNorm or LayerNorm
//     rope_cache    norm and rotary embedding of queries and keys, keys and values to the cache
//     attention     of tree nodes, or of a prompt's tokens, over the cache
//     glu           SiLU or GELU of the gate, times up
//     mix_delta     a gated delta layer over tree nodes, or over a prompt's tokens
//     commit_delta  the states of gated delta layers after the accepted path
//     run_blocks    transformer blocks, built from the functions above
//     sample        the best token of each row of logits, with or without Gumbel noise
//     step_draft, step_verify, step_sample, step_accept, step_commit: the stages of a decoding step
//
// Activations are float32. A row's bits depend only on that row: the order of each sum is fixed,
// regardless of other rows, the number of threads and the token's cache row. Functions are split
// into units for the threads; each unit writes its own part of the result.

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "cpu.h"

// cpu_library.py defines GROUP (inputs rounded to 8 bits with one scale), BINS, SCHEMA, SOURCES
// (see kernels.py) and the maxima MAX_TREE (T), MAX_HEAD (D), MAX_DEPTH (K), MAX_CHAIN (tokens
// proposed by lookup or a schema) and LARGEST (T chosen by a step)
#if !defined(PLAIN) && defined(__AVX512BW__)
#define LANES 16             // numbers in a vector
#elif !defined(PLAIN) && defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#if LANES == 16 || defined(__aarch64__)  // there are 32 vector registers, else 16
#define FLOAT_TILE (16 / SUMS)  // most rows multiplied at once by floats
#else
#define FLOAT_TILE (12 / SUMS)
#endif
#define TILE 8               // most rows multiplied at once
#define PAIRED (LANES == 8 ? 6 : 0)  // most rows multiplied by two blocks at once
#define ZERO 32              // subtracted from a number of INT6
#define SUMS (LANES == 16 ? 2 : 4)  // sums of floats per row, which hide the additions' latency
#define SPLIT 128            // cache positions per unit of attention
#define COLUMNS (SPLIT + MAX_TREE)  // its rows in memory: of committed tokens, then of nodes
#define MIN_NODES 4          // fewest nodes of a unit, if there are too few units
#define SHARING 3            // heads that share loads of keys and values
#define IN_PLACE (LANES == 16)  // bfloat16 rows of the cache are converted where they are multiplied
#define WIDE (4 * LANES)     // columns, or dimensions, whose sums are in registers
#define STRIP (SUMS * LANES)  // columns of a recurrent state that are read together
#define WORD (4 * LANES)     // bytes of a vector
#define MAX_CANDIDATES 2048  // most candidates of a tree: K * n, and a chain
#define MAX_PARTS (1 << 23)  // numbers in the partial results of an attention
#define PART 4096            // tokens per unit of argmax
#define BEAMS 64             // beams whose logits are in memory at once
#define SKIP (8 * LANES)     // tokens of a beam that are skipped at once if none is among the best
#define UNIT (1 << 19)       // numbers of a weight per unit, within 2 to 8 units per thread
#define MIN_WORK 4096        // with fewer numbers a function stays on one thread
#define FETCH 2048           // prefetch distance in bytes
#define AHEAD 16384          // bytes of a block up to which the next pair of blocks is prefetched
#define SPINS 4000           // polls before a thread sleeps: about 0.1 ms
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#pragma GCC diagnostic ignored "-Wpsabi"  // functions with vector arguments are all inlined

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int16_t vs __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int8_t vb __attribute__((vector_size(LANES)));
typedef float vf_anywhere __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t vh_anywhere __attribute__((vector_size(2 * LANES), aligned(1), may_alias));

const int32_t lanes = LANES;
const char *const instructions =  // that these kernels were compiled for
#if LANES == 16
    "AVX-512"
#elif LANES == 8
    "AVX2"
#elif !defined(PLAIN) && defined(__aarch64__)
    "NEON"
#elif !defined(PLAIN) && defined(__SSSE3__)
    "SSSE3"
#else
    "plain C"
#endif
#if LANES == 16 && defined(__AVX512VNNI__) || LANES == 8 && defined(__AVXVNNI__)
    " VNNI"
#elif !defined(PLAIN) && defined(__ARM_FEATURE_DOTPROD)
    " DOTPROD"
#endif
#if LANES == 16 && defined(__AVX512BF16__)
    " BF16"
#endif
    ;

#define LANES_4(s) 0 ^ (s), 1 ^ (s), 2 ^ (s), 3 ^ (s)
#define LANES_8(s) LANES_4(s), 4 ^ (s), 5 ^ (s), 6 ^ (s), 7 ^ (s)
#define LANES_16(s) LANES_8(s), 8 ^ (s), 9 ^ (s), 10 ^ (s), 11 ^ (s), 12 ^ (s), 13 ^ (s), 14 ^ (s), \
                    15 ^ (s)
#if LANES == 16
#define ALL_LANES LANES_16   // the lanes' numbers, each ^ s
#elif LANES == 8
#define ALL_LANES LANES_8
#else
#define ALL_LANES LANES_4
#endif
static const vi NUMBERS = {ALL_LANES(0)};

typedef struct {                 // arguments of add_norm, rope_cache, attention and glu
    const BlockWeights *block;
    const Pass *pass;
    const NormWeights *post, *norm;  // of delta, of the sum
    float *x, *delta, *out, *parts;  // [M, ...]
    int splits, width, first, nodes;
    int chunks;                  // of a unit's nodes, if there are too few units for the threads
} Call;

INLINE int min(int a, int b) { return a < b ? a : b; }
INLINE int max(int a, int b) { return a > b ? a : b; }
INLINE int slot_of(const Pass *pass, int b) { return pass->slots ? pass->slots[b] : b; }
INLINE int length_of(const Pass *pass, int b) { return pass->lengths[slot_of(pass, b)]; }
INLINE int start_of(const Pass *pass, int b) { return length_of(pass, b) + pass->first; }

// -------------------------------------------------------------------------------------------------
// Dot products of bytes: the only part that is specific to a processor
//
// A word is four bytes of a weight for each lane. `add_word` adds w[0] x[0] + ... + w[3] x[3] to each
// lane of a Partial, where all lanes share the signed bytes at x (NEON: lane j of x); `total` adds a
// Partial to int32 sums. A Partial of int16 holds the sums of only PARTIAL_WORDS words: 2 products of
// a word meet in a number, and 8 * 2 * 15 * 127, 4 * 2 * 31 * 127, 2 * 2 * 63 * 127 and
// 2 * 128 * 127 fit. So a sum is the same integer everywhere.
//
// Numbers of 4 to 6 bits are unsigned; those of 8 bits are signed, or have OFFSET added.

#if !defined(PLAIN) && defined(__SSSE3__)
#include <immintrin.h>
#elif !defined(PLAIN) && defined(__aarch64__)
#include <arm_neon.h>
#endif

#if LANES == 16
typedef __m512i vx;
#define X86(name) _mm512_##name
#elif LANES == 8
typedef __m256i vx;
#define X86(name) _mm256_##name
#elif !defined(PLAIN) && defined(__SSSE3__)
typedef __m128i vx;
#define X86(name) _mm_##name
#endif

INLINE vi splat_word(int32_t x) { return x - (vi){0}; }

// Computes a vector here: compilers would reorder the sums, for which registers do not suffice. On
// AArch64 they also move loads up until registers spill; volatile statements keep their order.
#if defined(__x86_64__)
#define IN_ORDER(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define IN_ORDER(v) __asm__ volatile("" : "+w"(v))
#else
#define IN_ORDER(v)
#endif

#if LANES == 16 && defined(__AVX512VNNI__) || LANES == 8 && defined(__AVXVNNI__)
#define OFFSET 128
#define PARTIAL_WORDS(kind) 8
typedef vi Partial;
INLINE Partial begin(vi sum) { return sum; }
INLINE vi total(vi sum, Partial partial) { return partial; }
INLINE Partial add_word(Partial sum, vi w, const int32_t *x, int kind) {
#if LANES == 16                  // from memory: compilers load x, and finish one row before the next
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
    return sum;
#else
    return (vi)_mm256_dpbusd_avx_epi32((vx)sum, (vx)w, (vx)splat_word(*x));
#endif
}

#elif !defined(PLAIN) && defined(__ARM_FEATURE_DOTPROD)
#define OFFSET 0
#define PARTIAL_WORDS(kind) 8
typedef vi Partial;
INLINE Partial begin(vi sum) { return sum; }
INLINE vi total(vi sum, Partial partial) { return partial; }
INLINE Partial add_word(Partial sum, vi w, vi x, int j, int kind) {
#define DOT(lane) (vi)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x, lane)
    return j == 0 ? DOT(0) : j == 1 ? DOT(1) : j == 2 ? DOT(2) : DOT(3);
}

#elif !defined(PLAIN) && defined(__aarch64__)
#define OFFSET 0
#define PARTIAL_WORDS(kind) (kind == INT8 ? 2 : kind == INT6 ? 4 : 8)  // one product per number
typedef struct { int16x8_t low, high; } Partial;
INLINE Partial begin(vi sum) { return (Partial){{0}, {0}}; }
INLINE vi total(vi sum, Partial partial) {
    return sum + (vi)vpaddq_s32(vpaddlq_s16(partial.low), vpaddlq_s16(partial.high));
}
INLINE Partial add_word(Partial sum, vi w, vi x, int j, int kind) {
    int8x16_t a = (int8x16_t)w, b = (int8x16_t)splat_word(x[j]);
    IN_ORDER(b);
    sum.low = vmlal_s8(sum.low, vget_low_s8(a), vget_low_s8(b));
    sum.high = vmlal_high_s8(sum.high, a, b);
    return sum;
}

#else
#define OFFSET 0
#define PARTIAL_WORDS(kind) (kind == INT8 ? 1 : kind == INT6 ? 2 : kind == INT5 ? 4 : 8)
typedef vs Partial;
INLINE Partial begin(vi sum) { return (Partial){0}; }
#if LANES == 16
#define SIGN(x, w) _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x)
#else
#define SIGN X86(sign_epi8)
#endif
#ifdef X86
INLINE vi total(vi sum, Partial partial) {
    sum += (vi)X86(madd_epi16)((vx)partial, X86(set1_epi16)(1));
    IN_ORDER(sum);
    return sum;
}
INLINE Partial add_word(Partial sum, vi w, const int32_t *x, int kind) {
    vi xs = splat_word(*x);
    if (kind == INT8) {          // |w| * (x with w's sign): maddubs takes one operand as unsigned
        xs = (vi)SIGN((vx)xs, (vx)w);
        w = (vi)X86(abs_epi8)((vx)w);
    }
    sum += (vs)X86(maddubs_epi16)((vx)w, (vx)xs);
    IN_ORDER(sum);
    return sum;
}
#else
INLINE vi total(vi sum, Partial partial) {
    return sum + ((vi)partial << 16 >> 16) + ((vi)partial >> 16);
}
INLINE Partial add_word(Partial sum, vi w, const int32_t *x, int kind) {
    vs a = (vs)w, b = (vs)splat_word(*x);
    return sum + (a << 8 >> 8) * (b << 8 >> 8) + (a >> 8) * (b >> 8);
}
#endif
#endif

INLINE void pause_thread(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

// -------------------------------------------------------------------------------------------------
// Threads: a pool whose threads poll for work for a moment, then sleep. The calling thread takes
// units too, and waits only for units that another thread has begun.

typedef void Function(void *arguments, int unit);

#define NO_THREADS {.caller = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, \
                    .wake = PTHREAD_COND_INITIALIZER}
static struct Pool {
    pthread_mutex_t caller, sleep;
    pthread_cond_t wake;
    Function *function;
    void *arguments;
    int threads;
    atomic_int left, helpers, inside;  // units not begun; threads that may help; threads at work
} pool = NO_THREADS;

static void forget_threads(void) { pool = (struct Pool)NO_THREADS; }  // fork() copies no threads

static void take_units(void) {
    for (int left; (left = pool.left--) > 0;)
        pool.function(pool.arguments, left - 1);
}

static int has_work(void *number) { return pool.left > 0 && (intptr_t)number < pool.helpers; }

static void *run_thread(void *number) {
    for (;;) {
        for (int spins = 0; spins < SPINS && !has_work(number); spins++)
            pause_thread();
        if (!has_work(number)) {
            pthread_mutex_lock(&pool.sleep);
            while (!has_work(number))
                pthread_cond_wait(&pool.wake, &pool.sleep);
            pthread_mutex_unlock(&pool.sleep);
        }
        pool.inside++;
        take_units();
        pool.inside--;
    }
    return NULL;
}

// Calls the function for each unit; size: numbers in a unit
static void parallel(Function *function, void *arguments, int units, int64_t size, int threads) {
    if (threads < 2 || units < 2 || units * size < MIN_WORK
            || pthread_mutex_trylock(&pool.caller)) {
        for (int unit = 0; unit < units; unit++)
            function(arguments, unit);
        return;
    }
    if (!pool.threads)
        pthread_atfork(NULL, NULL, forget_threads);
    for (pthread_t thread; pool.threads < threads - 1; pool.threads++) {
        if (pthread_create(&thread, NULL, run_thread, (void *)(intptr_t)pool.threads))
            break;
        pthread_detach(thread);
    }
    pool.function = function;
    pool.arguments = arguments;
    pool.helpers = threads - 1;
    pthread_mutex_lock(&pool.sleep);
    pool.left = units;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleep);
    take_units();
    for (int spins = 0; pool.inside; spins++)
        spins < SPINS ? pause_thread() : (void)sched_yield();
    pthread_mutex_unlock(&pool.caller);
}

// Scratch memory of the calling thread, reused by later calls
enum { PREPARED, PASS, ROWS, PARTS, LOGITS, BEST, PATHS, DRAFT, NODES, BUFFERS };

static void *scratch(int which, size_t size) {
    static _Thread_local struct { void *data; size_t size; } buffers[BUFFERS];
    if (buffers[which].size < size) {
        free(buffers[which].data);
        buffers[which].size = (size + size / 2 + 63) / 64 * 64;
        buffers[which].data = aligned_alloc(64, buffers[which].size);
        if (!buffers[which].data)
            abort();
        memset(buffers[which].data, 0, buffers[which].size);  // denormal numbers would be slow
    }
    return buffers[which].data;
}

// -------------------------------------------------------------------------------------------------
// Vectors

INLINE void fetch(const char *from, int bytes) {
    for (int i = 0; i < bytes; i += 64)
        __builtin_prefetch(from + i);
}

INLINE vf splat(float x) { return x - (vf){0}; }

// a b + c, rounded once. Where it is written as such, compilers round once in some loops and twice in
// others, and a row's bits would depend on the rows beside it. Without fused instructions: twice.
INLINE vf fused(vf a, vf b, vf c) {
#if defined(X86) && (LANES == 16 || defined(__FMA__))
    return (vf)X86(fmadd_ps)(a, b, c);
#elif !defined(PLAIN) && defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FMA__) || defined(__aarch64__) || defined(FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++)
        c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE vf load(const void *x) { return *(const vf_anywhere *)x; }
INLINE void store(float *x, vf v) { *(vf_anywhere *)x = v; }

// Copies up to LANES items; LANES items with one instruction
INLINE void copy_n(void *to, const void *from, int n, int size) {
    if (n >= LANES) {
        memcpy(to, from, LANES * size);
        __asm__ volatile("");    // else clang makes one call of both copies
    } else {
        memcpy(to, from, max(n, 0) * size);
    }
}

INLINE vf load_n(const float *x, int n) {
    vf v = {0};
    copy_n(&v, x, n, sizeof *x);
    return v;
}

INLINE vf load_bytes(const char *x, int n) {
    vf v = {0};
    if (n >= WORD)
        return load(x);
    memcpy(&v, x, max(n, 0));
    return v;
}

INLINE vh load_halves(const uint16_t *x, int n) {
    vh halves = {0};
    if (n >= LANES)
        return *(const vh_anywhere *)x;
    memcpy(&halves, x, max(n, 0) * sizeof *x);
    return halves;
}

INLINE vu widened(vh x) {
#if LANES == 8                   // gcc 12 takes four instructions for the last line
    return (vu)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, vu);
#endif
}

INLINE vf select_lanes(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

INLINE vf from_bfloat16(vh halves) {
#if LANES == 16                  // one instruction, not two
    __m512i wide = _mm512_castsi256_si512((__m256i)halves);
    return (vf)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, (__m512i)(NUMBERS << 16), wide);
#else
    return (vf)(widened(halves) << 16);
#endif
}

// Up to LANES numbers, at most n, of a bfloat16 or float32 row
INLINE vf load_row(const void *x, size_t at, int n, int bfloat16) {
    return bfloat16 ? from_bfloat16(load_halves((const uint16_t *)x + at, n))
                    : load_n((const float *)x + at, n);
}

INLINE vh to_bfloat16(vf x) {    // to nearest, ties to even
    vu bits = (vu)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    return __builtin_convertvector((vu)select_lanes(x == x, (vf)rounded, (vf)bits) >> 16, vh);
}

// Writes x [n] to a bfloat16 or float32 row, from item `at`
static void write_row(void *out, size_t at, const float *x, int n, int bfloat16) {
    for (int i = 0; bfloat16 && i < n; i += LANES) {
        vh halves = to_bfloat16(load_n(x + i, n - i));
        copy_n((uint16_t *)out + at + i, &halves, n - i, sizeof(uint16_t));
    }
    if (!bfloat16)
        memcpy((float *)out + at, x, n * sizeof *x);
}

// Reads n numbers of a bfloat16 or float32 row, from item `at`
static void read_row(const void *x, size_t at, int n, int bfloat16, float *out) {
    for (int i = 0; i < n; i += LANES) {
        vf v = load_row(x, at + i, n - i, bfloat16);
        copy_n(out + i, &v, n - i, sizeof *out);
    }
}

INLINE vf from_float16(vh halves) {
#if LANES == 16
    return (vf)_mm512_cvtph_ps((__m256i)halves);
#elif LANES == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)halves);
#elif !defined(PLAIN) && defined(__aarch64__)
    return (vf)vcvt_f32_f16((float16x4_t)halves);
#else
    vu x = widened(halves);
    vf magnitude = (vf)((x & 0x7fff) << 13) * 0x1p112f, special = (vf)(x << 13 | 0x7f800000);
    magnitude = select_lanes((x & 0x7c00) == 0x7c00, special, magnitude);
    return (vf)((vu)magnitude | (x & 0x8000) << 16);
#endif
}

INLINE vf from_int8(const int8_t *x) {
    vb bytes;
    memcpy(&bytes, x, sizeof bytes);
#if LANES == 16                  // gcc 12 does not vectorise the last line
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif LANES == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
#else
    return __builtin_convertvector(bytes, vf);
#endif
}

// Lane i ^ s of v in lane i; s is a constant power of two
INLINE vf swap(vf v, int s) {
#ifdef __clang__
#define SHUFFLE(s) __builtin_shufflevector(v, v, ALL_LANES((s) % LANES))
    return s == 1 ? SHUFFLE(1) : s == 2 ? SHUFFLE(2) : s == 4 ? SHUFFLE(4) : SHUFFLE(8);
#else
    return __builtin_shuffle(v, NUMBERS ^ s);
#endif
}

typedef vf Combine(vf, vf);

INLINE vf add(vf a, vf b) { return a + b; }

INLINE vf larger(vf a, vf b) {   // b if one is NaN
#ifdef X86
    return (vf)X86(max_ps)(a, b);
#else
    return select_lanes(a > b, a, b);
#endif
}

INLINE vi larger_int(vi a, vi b) {
#if LANES > 4
    return (vi)X86(max_epi32)((vx)a, (vx)b);
#else
    return (vi)select_lanes(a > b, (vf)a, (vf)b);
#endif
}

INLINE int sum_ints(vi v) {
    UNROLL
    for (int s = LANES / 2; s > 0; s /= 2)
        v += (vi)swap((vf)v, s);
    return v[0];
}

// f over all lanes of v
INLINE float reduce(Combine *f, vf v) {
    UNROLL
    for (int s = LANES / 2; s > 0; s /= 2)
        v = f(v, swap(v, s));
    return v[0];
}
INLINE float sum_lanes(vf v) { return reduce(add, v); }
INLINE float max_lanes(vf v) { return reduce(larger, v); }

INLINE void exchange(vf *v, int s) {
    vi odd = NUMBERS & s;
    UNROLL
    for (int i = 0; i < LANES; i++)
        if (!(i & s)) {
            vf a = v[i], b = v[i + s];
#ifdef __clang__
            v[i] = select_lanes(odd != 0, swap(b, s), a);
            v[i + s] = select_lanes(odd != 0, b, swap(a, s));
#else                            // gcc does not join the shuffles
            v[i] = __builtin_shuffle(a, b, NUMBERS - odd + odd * (LANES / s));
            v[i + s] = __builtin_shuffle(a, b, (NUMBERS | s) + odd * (LANES / s));
#endif
        }
}

// Swaps lane j of v[i] and lane i of v[j]
INLINE void transpose(vf *v) {
    UNROLL
    for (int s = 1; s < LANES; s *= 2)
        exchange(v, s);
}

INLINE vf polynomial(vf x, int n, const float *c) {  // c[0] x^(n - 1) + ... + c[n - 1]
    vf y = splat(c[0]);
    for (int i = 1; i < n; i++)
        y = fused(y, x, splat(c[i]));
    return y;
}

INLINE vf vexp(vf x) {           // 2^n e^r, |r| <= ln(2) / 2; 0 below 2^-126
    static const float c[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                              4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    vf n = fused(x, splat(1.44269504f), splat(12582912.0f));  // its low bits hold an integer
    vf power = (vf)(((vi)n << 23) + 0x3f800000);
    n -= 12582912.0f;
    vf r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), x));
    vf p = fused(polynomial(r, 6, c) * r, r, r) + 1.0f;
    return select_lanes(x > 88.0f, splat(INFINITY), select_lanes(x < -87.0f, splat(0), p * power));
}

INLINE vf vlog(vf x) {           // n ln(2) + log(1 + f), sqrt(1/2) <= 1 + f < sqrt(2); normal x > 0
    static const float c[] = {7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f,
                              -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                              2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    vi bits = (vi)x - 0x3f3504f3;
    vf n = __builtin_convertvector(bits >> 23, vf);
    vf f = (vf)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f, p = polynomial(f, 9, c);
    return n * 0.693359375f + (f + (f * f * (p * f - 0.5f) - n * 2.12194440e-4f));
}

// -------------------------------------------------------------------------------------------------
// product
//
//   y[m, n] = sum_k x[m, k] w[n, k] + bias[n]
//
// A float32 weight multiplies float32 rows, a bfloat16 weight rows rounded to bfloat16. For weights
// of 8 bits and less, each group of 32 inputs is rounded to 8 bits, x = s * q. A weight w = scale *
// (p - zero) + minimum makes the group add s * scale * sum(q * (p - zero)) + s * minimum * sum(q)
// in float32. Both are sums of integers, so they are exact in any order. A scale is a float, or in
// llama.cpp's K types an int8 times a float16 shared by 256 inputs; INT6 has one per 16 inputs.
//
// Weights are packed in blocks of LANES outputs, one per lane, so no sum crosses lanes. Inputs are
// padded with zeros to a multiple of 4, or of 32 if quantized.
//
//     FLOAT32    [n / LANES][k][LANES]
//     BFLOAT16   [n / LANES][k / 2][LANES][2]
//     INT8       [n / LANES][k / 4][LANES][4], plus OFFSET
//     INT4       [n / LANES][k / 8][LANES][4]: 4 inputs in the low halves of bytes, 4 in the high
//     INT5       INT4 groups, each followed by a word whose bits j are the upper bits of word j
//     INT6       INT4 groups, each followed by two words: in word i, bits 2 j and 2 j + 1 are the
//                upper bits of word 4 i + j
//
// Memory traffic: the weight once, 0.5 to 4 bytes per number, and its scales. That bounds the time
// up to about 8 rows. More rows are split into tiles of equal size, all of which multiply a block
// while it is in the CPU's cache.

#if LANES == 16 && defined(__AVX512BF16__)
#define IN_PAIRS 1               // a product instruction takes two bfloat16 at a time
#else
#define IN_PAIRS 0
#endif

// Sums of q that are multiplied by `zero`: integers where dpbusd begins its sums with them. Elsewhere
// registers are free only after the sums, where a fused product of floats is cheaper and also exact
#if OFFSET
typedef int32_t Correction;
#else
typedef float Correction;
#endif

typedef struct {                 // inputs of a row, ready to multiply
    int32_t words[8];            // each a float32, two bfloat16 or four bytes
    float scale, sum;            // of bytes: sum = scale * sum(q)
    Correction minus[3];         // -ZERO * sum(q) of the first 16 bytes, of the other 16; -sum(q)
} Group;

typedef struct {
    const Linear *w;
    const float *x;              // [M, k]
    float *out;                  // [M, n]
    Group *groups;               // [tiles][n_groups][rows of a tile]
    int M, n, tiles, n_groups, width;  // n: all outputs; width: blocks that are multiplied together,
    int steps, per_unit;         // in so many steps
} Product;

INLINE int inputs_of(int kind) { return kind >= INT8 ? GROUP : kind == BFLOAT16 && IN_PAIRS ? 16 : 8; }

INLINE int blocks_of(const Linear *w) { return (w->n + LANES - 1) / LANES; }

INLINE int steps_of(const Product *p, const Linear *w) {
    return (blocks_of(w) + p->width - 1) / p->width;
}

INLINE int tile_start(const Product *p, int tile) {
    return tile * (p->M / p->tiles) + min(tile, p->M % p->tiles);
}

// Numbers -127 to 127 of a group to bytes
INLINE void write_bytes(const vi *q, int32_t *words) {
#if LANES == 8
    __m256i low = _mm256_packs_epi32((vx)q[0], (vx)q[1]), high = _mm256_packs_epi32((vx)q[2], (vx)q[3]);
    vx order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // undoes that of the packs
    vx bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    memcpy(words, &bytes, sizeof bytes);
#else
    for (int j = 0; j < GROUP / LANES; j++) {
        vb bytes = __builtin_convertvector(q[j], vb);
        memcpy((int8_t *)words + j * LANES, &bytes, sizeof bytes);
    }
#endif
}

// Rounds a group x to 8 bits
INLINE void round_group(const float *x, Group *group) {
    enum { VECTORS = GROUP / LANES };
    vi q[VECTORS], most = {0}, sums[2] = {{0}};
    UNROLL
    for (int j = 0; j < VECTORS; j++)
        most = larger_int((vi)load(x + j * LANES) & INT32_MAX, most);  // as |x|, NaN last
    UNROLL
    for (int s = LANES / 2; s > 0; s /= 2)
        most = larger_int((vi)swap((vf)most, s), most);
    float largest = ((vf)most)[0], inverse = 127.0f / largest;
    int usable = largest > 1e-30f && largest < INFINITY;  // else the scale is 0, infinite or NaN
    UNROLL
    for (int j = 0; j < VECTORS; j++) {
        vf sum = fused(load(x + j * LANES), splat(inverse), splat(12582912.0f));
        q[j] = ((vi)sum - 0x4b400000) & -usable;  // ties to even
        sums[j / (VECTORS / 2)] += q[j];
    }
    write_bytes(q, group->words);
    group->scale = largest / 127.0f;
    int first = -sum_ints(sums[0]), second = -sum_ints(sums[1]);
    group->minus[0] = ZERO * first;
    group->minus[1] = ZERO * second;
    group->minus[2] = first + second;
    group->sum = -group->minus[2] * group->scale;
}

// Copies x [n], up to a group, rounded to bfloat16 if the weight is
static void copy_group(const float *x, int n, int kind, int32_t *words) {
    memset(words, 0, sizeof((Group *)0)->words);
    if (kind == BFLOAT16 && IN_PAIRS)
        write_row(words, 0, x, n, 1);
    for (int i = 0; !(kind == BFLOAT16 && IN_PAIRS) && i < n; i += LANES) {
        vf v = load_n(x + i, n - i);
        if (kind == BFLOAT16)
            v = (vf)(widened(to_bfloat16(v)) << 16);
        copy_n(words + i, &v, n - i, sizeof v[0]);
    }
}

static void prepare_row(void *arguments, int m) {
    const Product *p = arguments;
    int kind = p->w->kind, inputs = inputs_of(kind);
    int rows = p->M / p->tiles, most = p->M % p->tiles * (rows + 1);  // rows in larger tiles
    int tile = m < most ? m / (rows + 1) : (m - most) / rows + p->M % p->tiles;
    int first = tile_start(p, tile);
    Group *group = p->groups + (size_t)first * p->n_groups + m - first;
    int stride = tile_start(p, tile + 1) - first, k = p->w->k;
    const float *x = p->x + (size_t)m * k;
    for (; kind < INT8 && k > 0; k -= inputs, x += inputs, group += stride)
        copy_group(x, min(k, inputs), kind, group->words);
    for (; k >= GROUP; k -= GROUP, x += GROUP, group += stride)
        round_group(x, group);
    if (k > 0) {
        float padded[GROUP] = {0};
        round_group(memcpy(padded, x, k * sizeof *x), group);
    }
}

// How scales are stored: float32, float16, int8 with factors in w->tops. Or cache rows: float32,
// bfloat16, bfloat16 of two rows by turns
enum { FLOATS, HALVES, BYTES, PAIRS };

INLINE int type_of(const Linear *w) { return w->tops ? BYTES : w->half ? HALVES : FLOATS; }

INLINE int scale_bytes(int type) { return LANES * (type == BYTES ? 1 : type == HALVES ? 2 : 4); }

INLINE vf load_factors(const Linear *w, size_t at) {  // at: in w->tops
    return from_float16(load_halves((const uint16_t *)w->tops + at, LANES));
}

// The scales, or minimums, at `from`
INLINE vf load_scales(const char *from, int type, vf factors) {
    if (type == HALVES)
        return from_float16(load_halves((const uint16_t *)from, LANES));
    return type == BYTES ? factors * from_int8((const int8_t *)from) : load(from);
}

// Word j of a group: inputs 4 j to 4 j + 3, in the bytes of each lane
INLINE vi load_word(const char *group, int j, int kind) {
    if (kind == INT8)
        return (vi)load(group + j * WORD);
    vu lower = (vu)load(group + j / 2 * WORD) >> j % 2 * 4 & 0x0f0f0f0f;
    if (kind == INT4)
        return (vi)lower;
    int at = kind == INT5 ? j : j % 4 * 2;  // where the upper bits are; they move to bit 4
    vu upper = (vu)load(group + (kind == INT5 ? 4 : 4 + j / 4) * WORD);
    upper = at < 4 ? upper << (4 - at) : upper >> (at - 4);
    return (vi)(lower | (upper & (kind == INT5 ? 0x10101010 : 0x30303030)));
}

INLINE int group_bytes(int kind) {
    return WORD * (kind == INT8 ? 8 : kind == INT6 ? 6 : kind == INT5 ? 5 : 4);
}

// Adds the products of a group's words, from word `first`, and n rows x to the rows' sums, for two
// blocks that are `next` bytes apart, or one. On NEON for one, and row by row: the words are in
// registers, and the Partial of one row
#if !defined(PLAIN) && defined(__aarch64__)
INLINE void sum_words(const char *group, size_t next, int blocks, const Group *x, int n, int kind,
                      int first, int words, vi (*sums)[TILE]) {
    vi w[8];
    UNROLL
    for (int j = 0; j < words; j++) {
        vi word = load_word(group, first + j, kind);
        IN_ORDER(word);
        w[j] = word;
    }
    UNROLL
    for (int i = 0; i < n; i++) {
        vi sum = sums[0][i];
        Partial partial = begin(sum);
        UNROLL
        for (int j = 0; j < words; j++) {
            vi four = (vi)load(x[i].words + (first + j) / 4 * 4);
            partial = add_word(partial, w[j], four, (first + j) % 4, kind);
            if ((j + 1) % PARTIAL_WORDS(kind) == 0 || j + 1 == words) {
                sum = total(sum, partial);
                partial = begin(sum);
            }
        }
        IN_ORDER(sum);
        sums[0][i] = sum;
    }
}
#else
INLINE void sum_words(const char *group, size_t next, int blocks, const Group *x, int n, int kind,
                      int first, int words, vi (*sums)[TILE]) {
    Partial partial[2][TILE];
    UNROLL
    for (int b = 0; b < blocks; b++)
        UNROLL
        for (int i = 0; i < n; i++)
            partial[b][i] = begin(sums[b][i]);
    UNROLL
    for (int j = 0; j < words; j++) {
        vi w[2];
        UNROLL
        for (int b = 0; b < blocks; b++) {
            vi word = load_word(group + b * next, first + j, kind);
            IN_ORDER(word);
            w[b] = word;
        }
        UNROLL
        for (int i = 0; i < n; i++)
            UNROLL
            for (int b = 0; b < blocks; b++)
                partial[b][i] = add_word(partial[b][i], w[b], &x[i].words[first + j], kind);
        if ((j + 1) % PARTIAL_WORDS(kind) == 0 || j + 1 == words)
            UNROLL
            for (int i = 0; i < n; i++)
                UNROLL
                for (int b = 0; b < blocks; b++) {
                    sums[b][i] = total(sums[b][i], partial[b][i]);
                    partial[b][i] = begin(sums[b][i]);
                }
    }
}
#endif

// Adds the products of n rows and a block of w to acc[0], and if blocks is 2, those of the next block
// to acc[1]. The last block of an odd number is its own next one. type: of the scales
INLINE void quantized_tile(const Product *p, const Linear *w, const Group *x, int block, int blocks,
                           int n, int kind, int has_minimum, int type, vf (*acc)[TILE]) {
    int parts = kind == INT6 ? 2 : 1, words = 8 / parts, size = group_bytes(kind);
    int per_scale = type == BYTES ? 1 : max(w->group / GROUP, 1);
    int has_zero = kind == INT8 ? OFFSET : !has_minimum;
    int zero = kind == INT8 ? OFFSET : kind == INT6 ? 1 : w->zero;  // times x.minus
    int used = 0, step = scale_bytes(type), has_next = block + 1 < blocks_of(w);
    int per_block = per_scale == 1 ? p->n_groups : (p->n_groups - 1) / per_scale + 1;
    size_t next = has_next * p->n_groups * (size_t)size;
    size_t next_scale = has_next * per_block * (size_t)(parts * step);
    size_t next_top = has_next * p->n_groups / 8 * 2 * LANES;
    size_t at = block * per_block * (size_t)(parts * step);
    size_t top = block * (size_t)p->n_groups / 8 * 2 * LANES;
    int is_short = blocks == 2 && next && next <= AHEAD;  // then the next pair is prefetched, in order
    size_t ahead = is_short ? 2 * next : FETCH, next_ahead = is_short ? (size_t)size : next;
    const char *values = (const char *)w->values + block * (size_t)p->n_groups * size;
    const char *scales = (const char *)w->scales + at;
    const char *minimums = has_minimum ? (const char *)w->minimums + at : scales;
    vf factors[2][2] = {{{0}}};  // of the scales and minimums of 8 groups
    for (int g = 0; g < p->n_groups; g++, x += n, values += size) {
        if (type == BYTES && g % 8 == 0) {
            UNROLL
            for (int b = 0; b < blocks; b++) {
                factors[b][0] = load_factors(w, top + b * next_top);
                factors[b][1] = load_factors(w, top + b * next_top + LANES);
            }
            top += 2 * LANES;
        }
        UNROLL
        for (int b = 0; b < blocks; b++)
            fetch(values + ahead + b * next_ahead, size);
        ahead += is_short * size;
        UNROLL
        for (int part = 0; part < parts; part++) {
            vi sums[2][TILE];
            vf scale[2], minimum[2];
            int of = parts == 2 ? part : 2;  // which inputs' sum `zero` multiplies
            UNROLL
            for (int i = 0; i < n; i++)
                UNROLL
                for (int b = 0; b < blocks; b++)
                    sums[b][i] = splat_word(OFFSET && has_zero ? zero * x[i].minus[of] : 0);
            sum_words(values, next, blocks, x, n, kind, part * words, words, sums);
            UNROLL
            for (int b = 0; b < blocks; b++) {
                size_t from = part * step + b * next_scale;
                scale[b] = load_scales(scales + from, type, factors[b][0]);
                if (has_minimum)
                    minimum[b] = load_scales(minimums + from, type, factors[b][1]);
            }
            UNROLL
            for (int i = 0; i < n; i++)
                UNROLL
                for (int b = 0; b < blocks; b++) {
                    vf products = __builtin_convertvector(sums[b][i], vf);
                    if (!OFFSET && has_zero)
                        products = fused(splat(x[i].minus[of]), splat(zero), products);
                    acc[b][i] = fused(products, scale[b] * x[i].scale, acc[b][i]);
                    if (has_minimum)
                        acc[b][i] = fused(minimum[b], splat(x[i].sum), acc[b][i]);
                }
        }
        if (type == BYTES || ++used == per_scale) {
            used = 0;
            scales += parts * step;
            minimums += parts * step;
        }
    }
}

// Word j + s of a row in each lane; s is a constant
INLINE vf splat_number(const Group *x, int j, int s) {
#ifdef __aarch64__               // a lane is an operand of the product
    return splat(load(x->words + j)[s]);
#else
    return (vf)splat_word(x->words[j + s]);
#endif
}

INLINE vf multiply_add(vf sum, vf w, vf x, int in_pairs) {
#if IN_PAIRS
    if (in_pairs)
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#endif
    sum = fused(w, x, sum);
    IN_ORDER(sum);
    return sum;
}

INLINE void float_tile(const Linear *w, const Group *x, int block, int n, int kind, vf *acc) {
    int in_pairs = kind == BFLOAT16 && IN_PAIRS, is_split = kind == BFLOAT16 && !IN_PAIRS;
    int padded = (w->k + 3) / 4 * 4, left = in_pairs ? padded / 2 : padded;  // left: words of x
    size_t size = (size_t)padded * (kind == FLOAT32 ? WORD : WORD / 2);
    const char *values = (const char *)w->values + block * size;
    vf sums[SUMS][TILE];
    for (int s = 0; s < SUMS; s++)
        for (int i = 0; i < n; i++)
            sums[s][i] = splat(0);
    for (; left > 0; left -= 8, x += n)
        for (int j = 0; j < min(left, 8); j += SUMS) {
            fetch(values + FETCH, is_split ? SUMS * WORD / 2 : SUMS * WORD);
            UNROLL
            for (int s = 0; s < SUMS; s++) {
                vi words = (vi)load(values);
                if (is_split)
                    words = s % 2 ? words & (int32_t)0xffff0000 : words << 16;
                IN_ORDER(words);  // gcc would load them anew for each row
                for (int i = 0; i < n; i++)
                    sums[s][i] = multiply_add(sums[s][i], (vf)words, splat_number(&x[i], j, s),
                                              in_pairs);
                values += is_split && s % 2 == 0 ? 0 : WORD;
            }
        }
    for (int i = 0; i < n; i++) {
        acc[i] = sums[0][i] + sums[1][i];
        if (SUMS == 4)
            acc[i] += sums[2][i] + sums[3][i];
    }
}

// Multiplies n rows, from row `first`, by some blocks of w; at: the column of their outputs. Two blocks
// at once from 4 rows: with fewer, memory sets the pace, and one block after the other reads faster
INLINE void tile(const Product *p, const Linear *w, int block, int at, int first, int n, int kind,
                 int has_minimum, int type) {
    int blocks = kind >= (OFFSET ? INT8 : INT4) && n > 3 && n <= PAIRED ? 2 : 1;
    int end = min(block + p->width, blocks_of(w));
    const Group *x = p->groups + (size_t)first * p->n_groups;
    for (; block < end; block += blocks, at += blocks * LANES) {
        vf acc[2][TILE];
        UNROLL
        for (int b = 0; b < blocks; b++)
            UNROLL
            for (int i = 0; i < n; i++)
                acc[b][i] = splat(0);
        if (kind >= INT8)
            quantized_tile(p, w, x, block, blocks, n, kind, has_minimum, type, acc);
        else
            float_tile(w, x, block, n, kind, acc[0]);
        for (int b = 0; b < blocks; b++) {
            int from = (block + b) * LANES, outputs = w->n - from;
            vf bias = w->bias ? load_n(w->bias + from, outputs) : splat(0);
            for (int i = 0; i < n; i++) {
                vf sum = acc[b][i] + bias;
                float *out = p->out + (size_t)(first + i) * p->n + at + b * LANES;
                copy_n(out, &sum, outputs, sizeof *out);
            }
        }
    }
}

// `tile` with n, kind, has_minimum (m) and type as constants, so that the sums stay in registers. One
// function for each: in larger ones, compilers keep fewer of them there
#define TILE_OF(kind, m, type, n) __attribute__((noinline)) static void \
    tile_##kind##_##m##_##type##_##n(const Product *p, const Linear *w, int block, int at, int first) { \
        tile(p, w, block, at, first, min(n, kind < INT8 ? FLOAT_TILE : TILE), kind, m, type); \
    }
#define EACH(f, kind, m, t) f(kind, m, t, 1) f(kind, m, t, 2) f(kind, m, t, 3) f(kind, m, t, 4) \
                            f(kind, m, t, 5) f(kind, m, t, 6) f(kind, m, t, 7) f(kind, m, t, 8)
#define EACH_KIND(f) f(FLOAT32, 0, HALVES) f(BFLOAT16, 0, HALVES) f(INT6, 0, BYTES) \
                     f(INT8, 0, FLOATS) f(INT8, 0, HALVES) f(INT8, 0, BYTES) \
                     f(INT8, 1, FLOATS) f(INT8, 1, HALVES) f(INT4, 0, FLOATS) f(INT4, 0, HALVES) \
                     f(INT4, 1, FLOATS) f(INT4, 1, HALVES) f(INT4, 1, BYTES) \
                     f(INT5, 0, HALVES) f(INT5, 1, HALVES) f(INT5, 1, BYTES)
#define TILES(kind, m, t) EACH(TILE_OF, kind, m, t)
#define NAME(kind, m, t, n) tile_##kind##_##m##_##t##_##n,
#define NAMES(kind, m, t) [kind][m][t] = {EACH(NAME, kind, m, t)},
EACH_KIND(TILES)

static void product_unit(void *arguments, int unit) {
    static void (*const tiles[][2][3][8])(const Product *, const Linear *, int, int, int) = {EACH_KIND(NAMES)};
    const Product *p = arguments;
    const Linear *w = p->w;
    int end = min((unit + 1) * p->per_unit, p->steps);
    int before = 0, outputs = 0;  // steps and outputs before w
    for (int i = unit * p->per_unit; i < end; i++) {
        for (int steps; i - before >= (steps = steps_of(p, w)); w = w->next) {
            before += steps;
            outputs += w->n;
        }
        int block = (i - before) * p->width, at = outputs + block * LANES;
        for (int t = 0, first = 0, n; t < p->tiles; t++, first += n) {
            n = p->M / p->tiles + (t < p->M % p->tiles);
            tiles[w->kind][w->minimums != NULL][type_of(w)][n - 1](p, w, block, at, first);
        }
    }
}

void product(const Linear *w, const float *x, int M, float *out, int threads) {
    int inputs = inputs_of(w->kind);
    int rows = w->kind < INT8 ? FLOAT_TILE : TILE;  // of a tile
    Product p = {w, x, out, .M = M, .tiles = (M + rows - 1) / rows, .width = PAIRED && M > 3 ? 2 : 1};
    p.n_groups = (w->k + inputs - 1) / inputs;
    p.groups = scratch(PREPARED, (size_t)M * p.n_groups * sizeof *p.groups);
    for (const Linear *part = w; part; part = part->next) {
        p.steps += steps_of(&p, part);
        p.n += part->n;
    }
    int units = min(max((int64_t)p.n * w->k / UNIT, 2 * threads), 8 * threads);
    p.per_unit = (p.steps + units - 1) / units;
    parallel(prepare_row, &p, M, w->k, threads);
    parallel(product_unit, &p, (p.steps + p.per_unit - 1) / p.per_unit, MIN_WORK, threads);
}

static void unpack_floats(const Linear *w, int row, float *out) {
    int size = w->kind == FLOAT32 ? 1 : 2;  // numbers in a word
    const uint32_t *words = (const uint32_t *)w->values
        + (size_t)(row / LANES) * ((w->k + 3) / 4 * 4 / size) * LANES + row % LANES;
    for (int i = 0; i < w->k; i++) {
        uint32_t word = words[i / size * LANES];
        uint32_t bits = size == 1 ? word : i % 2 ? word & 0xffff0000 : word << 16;
        memcpy(out + i, &bits, 4);
    }
}

static void unpack_quantized(const Linear *w, int row, float *out) {
    int n_groups = (w->k + GROUP - 1) / GROUP, lane = row % LANES, size = group_bytes(w->kind);
    int type = type_of(w);
    size_t first = (size_t)(row / LANES) * n_groups;
    for (int i = 0; i < w->k; i += 4) {
        size_t group = first + i / GROUP, top = group / 8 * 2 * LANES;
        size_t at = (first * GROUP + i) / w->group * scale_bytes(type);
        vi word = load_word((const char *)w->values + group * size, i % GROUP / 4, w->kind);
        vf factors = type == BYTES ? load_factors(w, top) : splat(0), minimum = splat(0);
        vf scale = load_scales((const char *)w->scales + at, type, factors);
        if (type == BYTES)
            factors = load_factors(w, top + LANES);
        if (w->minimums)
            minimum = load_scales((const char *)w->minimums + at, type, factors);
        for (int j = 0; j < min(w->k - i, 4); j++) {
            int q = word[lane] >> 8 * j & 255;
            q = w->kind == INT8 ? (int8_t)(q ^ OFFSET) : q - w->zero;
            out[i + j] = fused(splat(q), scale, minimum)[lane];
        }
    }
}

// Rows of a weight and those linked to it: out [count, k]. Returns 1 if a row is out of range.
int unpack_rows(const Linear *weights, const int64_t *rows, int count, float *out) {
    for (int m = 0; m < count; m++, out += weights->k) {
        const Linear *w = weights;
        int64_t row = rows[m];
        for (; w && row >= w->n; w = w->next)
            row -= w->n;
        if (!w || row < 0)
            return 1;
        (w->kind < INT8 ? unpack_floats : unpack_quantized)(w, row, out);
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// pack_rows
//
// Converts the rows of a file or a tensor to blocks of LANES outputs. llama.cpp's ggml-common.h
// describes the blocks of 32 or 256 inputs of its types.

#define SUPER_BLOCK 256      // most inputs in a block of a file

typedef struct {                 // a block of a file, decoded
    uint8_t q[SUPER_BLOCK];
    int8_t scales[2][16];        // scales and minimums, times tops
    uint16_t tops[2];            // or the block's only scale and minimum; float16
} FileBlock;

typedef struct {                 // arguments of pack_rows
    const Linear *w;
    const uint8_t *rows;
    const int64_t *order;        // row order; NULL: 0, 1, ...
    int64_t stride;              // bytes per row
    int type;
} Packing;

static void split_nibbles(const uint8_t *from, int n, uint8_t *q) {
    for (int i = 0; i < n; i++) {
        q[i] = from[i] & 15;
        q[i + n] = from[i] >> 4;
    }
}

// 8 scales and minimums of 6 bits
static void split_scales(const uint8_t *from, FileBlock *c) {
    for (int kind = 0; kind < 2; kind++)
        for (int i = 0; i < 4; i++) {
            c->scales[kind][i] = from[4 * kind + i] & 63;
            int low = kind ? from[8 + i] >> 4 : from[8 + i] & 15;
            c->scales[kind][4 + i] = low | from[4 * kind + i] >> 6 << 4;
        }
}

static void split_legacy(int type, const uint8_t *from, FileBlock *c) {
    int has_minimum = type == Q4_1 || type == Q5_1;
    memcpy(c->tops, from, has_minimum ? 4 : 2);
    from += has_minimum ? 4 : 2;
    uint32_t upper = 0;
    if (type == Q5_0 || type == Q5_1) {
        memcpy(&upper, from, 4);
        from += 4;
    }
    split_nibbles(from, GROUP / 2, c->q);
    for (int i = 0; upper && i < GROUP; i++)
        c->q[i] |= (upper >> i & 1) << 4;
}

static void split_k(int type, const uint8_t *from, FileBlock *c) {
    const uint8_t *upper = from + 16, *lower = from + (type == Q5_K ? 48 : 16);
    memcpy(c->tops, from, 4);
    c->tops[1] ^= 0x8000;        // negated: files store what is subtracted
    split_scales(from + 4, c);
    for (int i = 0; i < 4; i++)
        split_nibbles(lower + 32 * i, 32, c->q + 64 * i);
    for (int i = 0; type == Q5_K && i < 8; i++)
        for (int j = 0; j < 32; j++)
            c->q[32 * i + j] |= (upper[j] >> i & 1) << 4;
}

static void split_q6_k(const uint8_t *from, FileBlock *c) {
    for (int half = 0; half < 2; half++) {
        const uint8_t *lower = from + 64 * half, *upper = from + 128 + 32 * half;
        split_nibbles(lower, 64, c->q + 128 * half);
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 32; j++)
                c->q[128 * half + 32 * i + j] |= (upper[j] >> 2 * i & 3) << 4;
    }
    memcpy(c->scales[0], from + 192, 16);
    memcpy(c->tops, from + 208, 2);
}

static void split_iq4(int type, const uint8_t *from, FileBlock *c) {
    static const int8_t values[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69,
                                    89, 113};
    int groups = type == IQ4_XS ? 8 : 1;
    memcpy(c->tops, from, 2);
    for (int i = 0; i < groups; i++) {
        int low = from[4 + i / 2] >> i % 2 * 4 & 15, high = (from[2] | from[3] << 8) >> 2 * i & 3;
        c->scales[0][i] = (low | high << 4) - 32;
        split_nibbles(from + (type == IQ4_XS ? 8 : 2) + 16 * i, 16, c->q + 32 * i);
    }
    for (int i = 0; i < 32 * groups; i++)
        c->q[i] = values[c->q[i]];
}

static void split_block(const Packing *p, const uint8_t *from, int n, FileBlock *c) {
    switch (p->type) {
        case Q4_0: case Q4_1: case Q5_0: case Q5_1: split_legacy(p->type, from, c); break;
        case Q4_K: case Q5_K: split_k(p->type, from, c); break;
        case Q6_K: split_q6_k(from, c); break;
        case IQ4_NL: case IQ4_XS: split_iq4(p->type, from, c); break;
        case Q8_0: memcpy(c->tops, from, 2); from += 2;  // fallthrough
        default: memcpy(c->q, from, n);
    }
    for (int i = 0; p->w->kind == INT8 && i < n; i++)
        c->q[i] ^= OFFSET;
}

// Writes 32 inputs to a group; group: the first word of the output's lane
INLINE void place_group(int kind, const uint8_t *q, uint32_t *group) {
    uint32_t words[8], upper[2] = {0};
    memcpy(words, q, sizeof words);
    for (int j = 0; kind == INT8 && j < 8; j++)
        group[j * LANES] = words[j];
    for (int j = 0; kind != INT8 && j < 8; j += 2)
        group[j / 2 * LANES] = (words[j] & 0x0f0f0f0f) | (words[j + 1] & 0x0f0f0f0f) << 4;
    for (int j = 0; kind == INT5 && j < 8; j++)
        upper[0] |= (words[j] >> 4 & 0x01010101) << j;
    for (int j = 0; kind == INT6 && j < 8; j++)
        upper[j / 4] |= (words[j] >> 4 & 0x03030303) << j % 4 * 2;
    for (int j = 0; j < (kind == INT5 ? 1 : kind == INT6 ? 2 : 0); j++)
        group[(4 + j) * LANES] = upper[j];
}

static void place_scales(const Linear *w, const FileBlock *c, size_t chunk, int lane) {
    int count = SUPER_BLOCK / w->group;
    for (int which = 0; which < 2; which++) {
        void *scales = which ? w->minimums : w->scales;
        if (w->tops)
            ((uint16_t *)w->tops)[(chunk * 2 + which) * LANES + lane] = c->tops[which];
        if (scales && !w->tops)
            ((uint16_t *)scales)[chunk * LANES + lane] = c->tops[which];
        for (int i = 0; scales && w->tops && i < count; i++)
            ((int8_t *)scales)[(chunk * count + i) * LANES + lane] = c->scales[which][i];
    }
}

static const uint8_t *row_of(const Packing *p, int row) {  // NULL beyond the last row
    return row < p->w->n ? p->rows + (p->order ? p->order[row] : row) * p->stride : NULL;
}

static void pack_floats(void *arguments, int block) {
    const Packing *p = arguments;
    const Linear *w = p->w;
    int size = w->kind == BFLOAT16 ? 2 : 4, bytes = size * w->k, words = (w->k + 3) / 4 * size;
    uint32_t *values = (uint32_t *)w->values + (size_t)block * words * LANES;
    for (int i = 0; i < words; i++)
        for (int lane = 0; lane < LANES; lane++) {
            const uint8_t *row = row_of(p, block * LANES + lane);
            uint32_t *word = values + i * LANES + lane;
            *word = 0;
            if (row && bytes - 4 * i >= 4)
                memcpy(word, row + 4 * i, 4);
            else if (row && bytes > 4 * i)
                memcpy(word, row + 4 * i, bytes - 4 * i);
        }
}

static void pack_quantized(void *arguments, int block) {
    const Packing *p = arguments;
    const Linear *w = p->w;
    int size = w->tops ? SUPER_BLOCK : GROUP, chunks = (w->k + size - 1) / size, per_chunk = size / GROUP;
    int64_t bytes = p->type == RAW_BYTES ? GROUP : p->stride / chunks;
    for (int i = 0; i < chunks; i++)
        for (int lane = 0; lane < LANES; lane++) {
            const uint8_t *row = row_of(p, block * LANES + lane);
            size_t at = (size_t)block * chunks + i;
            int n = min(w->k - i * size, size);
            FileBlock c;
            if (!row || n < size)
                memset(&c, 0, sizeof c);
            if (row)
                split_block(p, row + i * bytes, n, &c);
            for (int g = 0; g < per_chunk; g++) {
                char *group = (char *)w->values + (at * per_chunk + g) * group_bytes(w->kind);
                place_group(w->kind, c.q + GROUP * g, (uint32_t *)group + lane);
            }
            if (p->type != RAW_BYTES)
                place_scales(w, &c, at, lane);
        }
}

// Packs rows of `stride` bytes into a weight's memory. order: int64 [n] or NULL; type: see above.
void pack_rows(const Linear *w, int type, const uint8_t *rows, int64_t stride, const int64_t *order,
               int threads) {
    Packing p = {w, rows, order, stride, type};
    parallel(type == RAW_FLOATS ? pack_floats : pack_quantized, &p, blocks_of(w), (int64_t)w->k * LANES,
             threads);
}

// -------------------------------------------------------------------------------------------------
// add_norm
//
//   x = x + post(delta);  out = x / sqrt(mean(x^2) + eps) * weight, or LayerNorm

static void norm_row(const NormWeights *norm, const float *x, int n, float *out) {
    if (!norm->weight) {
        memcpy(out, x, n * sizeof *x);
        return;
    }
    vf total = {0}, squares = {0};
    for (int i = 0; norm->bias && i < n; i += LANES)
        total += load_n(x + i, n - i);
    float mean = sum_lanes(total) / n;
    for (int i = 0; i < n; i += LANES) {
        vf v = select_lanes(NUMBERS < n - i, load_n(x + i, n - i) - mean, splat(0));
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum_lanes(squares) / n + norm->eps);
    for (int i = 0; i < n; i++)
        out[i] = (x[i] - mean) * scale * norm->weight[i] + (norm->bias ? norm->bias[i] : 0.0f);
}

// x and delta [M, C] are changed in place; delta may be NULL
static void add_norm_row(void *arguments, int m) {
    const Call *a = arguments;
    int C = a->block->n_embd;
    float *x = a->x + (size_t)m * C, *out = a->out + (size_t)m * C;
    float *delta = a->delta ? a->delta + (size_t)m * C : NULL;
    if (delta && a->post->weight)
        norm_row(a->post, delta, C, delta);
    for (int i = 0; delta && i < C; i++)
        x[i] += delta[i];
    norm_row(a->norm, x, C, out);
}

// -------------------------------------------------------------------------------------------------
// rope_cache
//
//   q, k = norm(q), norm(k), per head or over all;  x[i] = x[i] cos[i] + x[(i + D/2) % D] sin[i]
//
// Writes queries to `out`, keys and values to rows lengths[b] + first + t of the cache.

INLINE size_t cache_at(const Call *a, int is_value, int b, int head, int64_t row) {
    return is_value * a->pass->value_stride + slot_of(a->pass, b) * a->pass->batch_stride
        + head * a->pass->head_stride + row * a->block->head_size;
}

static void rope_cache_row(void *arguments, int m) {
    const Call *a = arguments;
    const BlockWeights *c = a->block;
    int D = c->head_size, Hq = c->n_head, Hkv = c->n_kv_head, T = a->pass->T;
    const void *table = c->rope < 0 ? NULL : c->rope ? a->pass->own_rope : a->pass->rope;
    float rope[2 * MAX_HEAD + LANES];
    for (int i = 0; table && i < 2 * D; i += LANES)
        store(rope + i, load_row(table, a->pass->positions[m] * 2 * D + i, 2 * D - i,
                                 a->pass->bfloat16));
    float *x = a->x + ((size_t)m * ((1 + c->attn_gate) * Hq + 2 * Hkv) + c->attn_gate * Hq) * D;
    if (c->q_norm.weight && c->norms_all) {
        norm_row(&c->q_norm, x, Hq * D, x);
        norm_row(&c->k_norm, x + Hq * D, Hkv * D, x + Hq * D);
    }
    for (int h = 0; h < Hq + 2 * Hkv; h++, x += D) {
        int kv = h - Hq, is_value = kv >= Hkv;
        float rotated[MAX_HEAD + LANES];
        if (c->q_norm.weight && !c->norms_all && !is_value)
            norm_row(kv < 0 ? &c->q_norm : &c->k_norm, x, D, x);
        for (int i = 0; i < D; i++)
            rotated[i] = is_value || !table ? x[i]
                : x[i] * rope[i] + x[i < D / 2 ? i + D / 2 : i - D / 2] * rope[D + i];
        size_t at = kv < 0 ? ((size_t)m * Hq + h) * D
            : cache_at(a, is_value, m / T, kv % Hkv, start_of(a->pass, m / T) + m % T);
        write_row(kv < 0 ? a->out : a->pass->kv, at, rotated, D, kv >= 0 && a->pass->bfloat16);
    }
}

// -------------------------------------------------------------------------------------------------
// attention
//
//   out[m, h] = sum_s softmax_s(scale * q[m, h] . k[s]) v[s], over the rows s that m sees; details
//   and ALiBi as in kernels.tree_attention
//
// A query sees one cache row per position: the committed rows, then its ancestors' rows. Sums run
// over dimensions, then over positions, in splits of 128, so they do not depend on which rows hold
// the ancestors; the splits of a query are then added in order. A unit is a split of a kv head, for
// up to 64 nodes, or for a part of them where units are few. Scores have columns: one for each position
// that nodes share, then one for each node of the tree, whose scores are moved to the positions of each
// query. Keys are transposed, WIDE columns at a time; values are read where they are.
//
// Memory traffic: keys and values, once per 64 nodes.

typedef struct {                 // a split; positions count from its first one
    const Call *a;
    int b, kv, start, length;    // length: of the committed rows
    int shared, tree, columns;   // end of the positions' columns; first column of the nodes; their end
    float *keys;                 // [D][WIDE] of some columns; bfloat16: [D / 2][WIDE][2]
    const char *values;          // of position i in row i, of node j in row `nodes_at` + j
    int form, stride, nodes_at;  // of values: FLOATS or HALVES, bytes in a row
} Split;

typedef struct {                 // what a node sees of it: positions `low` to `end`
    int position, low, end;
    uint64_t ancestors;
} View;

INLINE View view_of(const Split *s, int m) {
    const Pass *pass = s->a->pass;
    int window = s->a->block->window;
    View v = {.ancestors = pass->ancestors ? pass->ancestors[m] : 0};
    v.position = s->length + (pass->ancestors ? __builtin_popcountll(v.ancestors) - 1 : m % pass->T);
    v.low = window ? min(max(v.position + 1 - window, 0), SPLIT) : 0;
    v.end = min(max(v.position + 1, 0), SPLIT);
    return v;
}

// out[h, j] += sum_i x[h, i] y[i, j] over i from `first` to `last`, in order, for n rows h
INLINE void add_tile(int form, const float *x, int x_stride, const char *y, int y_stride, int first,
                     int last, int n, int vectors, float *out, int out_stride) {
    int step = form == PAIRS ? 2 : 1;  // rows of y that share words
    vf sums[SHARING][WIDE / LANES];
    for (int h = 0; h < n; h++)
        for (int j = 0; j < vectors; j++)
            sums[h][j] = load(out + h * out_stride + j * LANES);
    for (int i = first; i < last; i += step)
        for (int k = 0; k < step && i + k < last; k++)  // D may be odd
            for (int j = 0; j < vectors; j++) {
                vf v = load_row(y + i / step * y_stride, j * LANES, LANES, form == HALVES);
                if (form == PAIRS)
                    v = (vf)(k ? (vu)v & 0xffff0000 : (vu)v << 16);
                for (int h = 0; h < n; h++)
                    sums[h][j] = fused(splat(x[h * x_stride + i + k]), v, sums[h][j]);
            }
    for (int h = 0; h < n; h++)
        for (int j = 0; j < vectors; j++)
            store(out + h * out_stride + j * LANES, sums[h][j]);
}

// `add_tile` with constants, so that the sums stay in registers; width: numbers of a row that matter
#define CASE(form, n, vectors) case 64 * form + 8 * n + vectors: \
    add_tile(form, x, x_stride, y, y_stride, first, last, n, vectors, out, out_stride); break;
#define CASES(form) CASE(form, 1, 1) CASE(form, 1, 2) CASE(form, 1, 4) CASE(form, 2, 1) CASE(form, 2, 2) \
                    CASE(form, 2, 4) CASE(form, 3, 1) CASE(form, 3, 2) CASE(form, 3, 4)
static void add_products(int form, const float *x, int x_stride, const char *y, int y_stride, int first,
                         int last, int n, int width, float *out, int out_stride) {
    for (int done; width > 0; width -= done, out += done, y += done * (form == HALVES ? 2 : 4)) {
        int vectors = width >= 4 * LANES ? 4 : width >= 2 * LANES ? 2 : 1;
        done = vectors * LANES;
        switch (64 * form + 8 * n + vectors) { CASES(FLOATS) CASES(HALVES) CASES(PAIRS) }
    }
}

// How many of the heads that are left share loads: 4 are 2 and 2
INLINE int sharing(int left) { return left == SHARING + 1 ? SHARING - 1 : min(left, SHARING); }

// Transposes the keys of up to LANES columns
static void read_keys(const Split *s, int column, float *to) {
    int D = s->a->block->head_size, is_half = s->a->pass->bfloat16, bytes = is_half ? 2 : 4;
    int is_tree = column >= s->tree, count = min((is_tree ? s->columns : s->shared) - column, LANES);
    int row = s->start + column + (is_tree ? s->length - s->tree : 0);
    const char *key = (char *)s->a->pass->kv + cache_at(s->a, 0, s->b, s->kv, row) * bytes;
    for (int d = 0; d < D; d += WORD / bytes) {
        vf v[LANES];             // in a lane one number, or two of bfloat16
        for (int i = 0; i < LANES; i++)
            v[i] = load_bytes(key + (min(i, count - 1) * D + d) * bytes, (D - d) * bytes);
        transpose(v);
        UNROLL
        for (int i = 0; i < LANES; i++, to += WIDE) {
            store(to, is_half && !IN_PLACE ? (vf)((vu)v[i] << 16) : v[i]);
            if (is_half && !IN_PLACE)
                store(to += WIDE, (vf)((vu)v[i] & 0xffff0000));
        }
    }
}

// Copies the values of all columns, as float32 and padded
static void read_values(Split *s, float *to) {
    int D = s->a->block->head_size, padded = s->a->width - LANES, bfloat16 = s->a->pass->bfloat16;
    for (int c = 0; c < s->columns; c++)
        for (int d = 0; d < D && (c < s->shared || c >= s->tree); d += LANES) {
            const char *row = s->values + (c < s->tree ? c : s->nodes_at + c - s->tree) * s->stride;
            store(to + c * padded + d, load_row(row, d, D - d, bfloat16));
        }
    s->values = (char *)to;
    s->form = FLOATS;
    s->stride = padded * sizeof *to;
    s->nodes_at = s->tree;
}

// Turns a query's scores of columns into weights of positions; total: their sum, the maximum score.
// Ancestors are in ascending order, and s->tree >= s->length, so no score is overwritten unread
static void weigh(const Split *s, View v, int head, float *scores, float *total) {
    const float *slopes = s->a->pass->slopes;
    vf best = splat(-INFINITY), sum = splat(0);
    for (int i = s->length; v.ancestors && i < v.end; i++, v.ancestors &= v.ancestors - 1)
        if (i >= 0)
            scores[i] = scores[s->tree + __builtin_ctzll(v.ancestors)];
    for (int i = v.low / LANES * LANES; i < v.end; i += LANES) {
        vi at = NUMBERS + i;
        vf score = load(scores + i) * s->a->block->scale;
        if (slopes)
            score = fused(splat(slopes[head]), __builtin_convertvector(at - v.position, vf), score);
        if (i < v.low || i + LANES > v.end)
            score = select_lanes((at >= v.low) & (at < v.end), score, splat(-INFINITY));
        best = larger(score, best);
        store(scores + i, score);
    }
    total[1] = max_lanes(best);
    for (int i = v.low / LANES * LANES; i < v.end; i += LANES) {
        vf weight = vexp(load(scores + i) - total[1]);
        sum += weight;
        store(scores + i, weight);
    }
    total[0] = sum_lanes(sum);
}

// The nodes of a unit, of which m is the first: scores [G, COLUMNS] of each, and rows [G, width] of
// part: weighted sum of the values, zeros up to `padded`, then `total`
static void attend_nodes(const Split *s, int m, float *scores, float *part) {
    const Call *a = s->a;
    int D = a->block->head_size, Hq = a->block->n_head, G = Hq / a->block->n_kv_head, n;
    int padded = a->width - LANES, nodes = a->nodes;
    memset(scores, 0, (size_t)nodes * G * COLUMNS * sizeof *scores);
    for (int at = 0; at < s->columns; at += WIDE) {
        int width = min(s->columns - at, WIDE), form = a->pass->bfloat16 && IN_PLACE ? PAIRS : FLOATS;
        for (int i = 0; i < width; i += LANES)
            read_keys(s, at + i, s->keys + i);
        for (int i = 0; i < nodes; i++) {
            View v = view_of(s, m + i);
            int is_seen = (at < v.end && at + WIDE > v.low) || at + WIDE > s->tree;
            for (int h = 0; is_seen && h < G; h += n) {
                n = sharing(G - h);
                const float *q = a->x + ((size_t)(m + i) * Hq + s->kv * G + h) * D;
                add_products(form, q, D, (char *)s->keys, 4 * WIDE, 0, D, n, width,
                             scores + (i * G + h) * COLUMNS + at, COLUMNS);
            }
        }
    }
    for (int i = 0; i < nodes * G; i++) {
        float *out = part + i * a->width;
        memset(out, 0, padded * sizeof *out);
        weigh(s, view_of(s, m + i / G), s->kv * G + i % G, scores + i * COLUMNS, out + padded);
    }
    for (int i = 0; i < nodes; i++)
        for (int h = 0; h < G; h += n) {
            View v = view_of(s, m + i);
            const float *weights = scores + (i * G + h) * COLUMNS;
            float *out = part + (i * G + h) * a->width;
            n = sharing(G - h);
            add_products(s->form, weights, COLUMNS, s->values, s->stride, v.low, min(v.end, s->shared), n, D,
                         out, a->width);
            for (int j = s->length; v.ancestors && j < v.end; j++, v.ancestors &= v.ancestors - 1) {
                const char *row = s->values + (s->nodes_at + __builtin_ctzll(v.ancestors)) * s->stride;
                if (j >= v.low)
                    add_products(s->form, weights + j, COLUMNS, row, s->stride, 0, 1, n, D, out, a->width);
            }
        }
}

static void attend_split(void *arguments, int unit) {
    Call a = *(const Call *)arguments;
    int Hkv = a.block->n_kv_head, G = a.block->n_head / Hkv, is_tree = a.pass->ancestors != NULL;
    float *part = a.parts + (size_t)(unit / a.chunks) * a.nodes * G * a.width;
    int chunk = unit % a.chunks * a.nodes / a.chunks, end = (unit % a.chunks + 1) * a.nodes / a.chunks;
    a.first += chunk;
    a.nodes = end - chunk;
    unit /= a.chunks;
    Split s = {&a, unit / a.splits / Hkv, unit / a.splits % Hkv, unit % a.splits * SPLIT};
    int padded = a.width - LANES, seen = a.pass->first + a.first + a.nodes, D = a.block->head_size;
    size_t first = cache_at(&a, 1, s.b, s.kv, s.start);
    s.length = length_of(a.pass, s.b) - s.start;
    s.keys = scratch(ROWS, (padded * (WIDE + COLUMNS) + a.nodes * G * COLUMNS) * sizeof *s.keys);
    s.values = (char *)a.pass->kv + first * (a.pass->bfloat16 ? 2 : 4);
    s.form = a.pass->bfloat16 ? HALVES : FLOATS;
    s.stride = D * (a.pass->bfloat16 ? 2 : 4);
    s.nodes_at = s.length;
    s.shared = min(max(s.length + (is_tree ? 0 : seen), 0), SPLIT);
    s.columns = s.tree = (s.shared + LANES - 1) / LANES * LANES;
    if (is_tree && s.length < SPLIT && s.length + seen > 0)
        s.columns += seen;
    if (D % LANES || (a.pass->bfloat16 && !IN_PLACE))
        read_values(&s, s.keys + padded * WIDE);
    attend_nodes(&s, s.b * a.pass->T + a.first, s.keys + padded * (WIDE + COLUMNS),
                 part + (size_t)chunk * G * a.width);
}

static void merge_splits(void *arguments, int unit) {
    const Call *a = arguments;
    int D = a->block->head_size, Hq = a->block->n_head, G = Hq / a->block->n_kv_head, head = unit % Hq;
    int node = unit / Hq % a->nodes, b = unit / Hq / a->nodes;
    size_t at = ((size_t)b * a->pass->T + a->first + node) * Hq + head;  // in [M, Hq]
    size_t stride = (size_t)a->nodes * G * a->width, first = (b * Hq + head) / G * a->splits * stride;
    const float *part = a->parts + first + (node * G + head % G) * a->width, *sum = part + a->width - LANES;
    float maximum = -INFINITY;
    vf values[MAX_HEAD / LANES + 1] = {{0}};
    for (int s = 0; s < a->splits; s++)
        maximum = sum[s * stride + 1] > maximum ? sum[s * stride + 1] : maximum;
    for (int s = 0; s < a->splits; s++) {
        float scale = sum[s * stride] == 0 ? 0 : expf(sum[s * stride + 1] - maximum);
        for (int d = 0; d < a->width; d += LANES)
            values[d / LANES] = fused(splat(scale), load(part + s * stride + d), values[d / LANES]);
    }
    float total = values[a->width / LANES - 1][0];
    for (int d = 0; d < D; d += LANES) {
        vf v = total == 0 ? splat(0) : values[d / LANES] / total;
        copy_n(a->out + at * D + d, &v, D - d, sizeof(float));
    }
}

// q, out [M, Hq, D]
void attention(const BlockWeights *block, const Pass *pass, float *q, float *out) {
    Call a = {.block = block, .pass = pass, .x = q, .out = out};
    int longest = 0, Hq = block->n_head, D = block->head_size;
    for (int b = 0; b < pass->B; b++)
        longest = max(longest, start_of(pass, b) + pass->T);
    a.splits = (longest + SPLIT - 1) / SPLIT;
    a.width = (D + WIDE - 1) / WIDE * WIDE + LANES;
    int units = pass->B * block->n_kv_head * a.splits;
    size_t size = (size_t)pass->B * Hq * a.splits * a.width;  // per node
    int nodes = min(MAX_PARTS / (size + 1) + 1, min(pass->T, MAX_TREE));
    a.parts = scratch(PARTS, size * nodes * sizeof *a.parts);  // [B, Hkv, splits, nodes, G, width]
    for (; a.first < pass->T; a.first += nodes) {
        a.nodes = min(pass->T - a.first, nodes);
        a.chunks = max(min((2 * pass->threads - 1) / units + 1, a.nodes / MIN_NODES), 1);
        int64_t work = (int64_t)a.nodes * Hq * min(longest, SPLIT);
        parallel(attend_split, &a, units * a.chunks, work, pass->threads);
        parallel(merge_splits, &a, pass->B * a.nodes * Hq, a.splits * D, pass->threads);
    }
}

// -------------------------------------------------------------------------------------------------
// glu
//
//   y = act(gate) * up, or act(up) if not gated; silu(x) = x / (1 + e^-x); gelu(x), by its tanh
//   approximation, is x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3)

static void glu_row(void *arguments, int m) {
    const Call *a = arguments;
    int n = a->block->n_inner, gated = a->block->gated;
    const float *x = a->x + (size_t)m * n * (1 + gated);
    for (int i = 0; i < n; i += LANES) {
        vf v = load_n(x + i, n - i);
        vf y = a->block->gelu ? 1.5957691216f * (v + 0.044715f * v * v * v) : v;
        v /= 1.0f + vexp(-y);
        if (gated)
            v *= load_n(x + n + i, n - i);
        copy_n(a->out + (size_t)m * n + i, &v, n - i, sizeof(float));
    }
}

// -------------------------------------------------------------------------------------------------
// mix_attention
//
//   out = proj(attention(q, k, v)), or proj(attention(q, k, v) sigmoid(gate))

// y [n] *= sigmoid(x), or silu(x)
static void gate(float *y, const float *x, int n, int is_silu) {
    for (int i = 0; i < n; i += LANES) {
        vf v = load_n(x + i, n - i), gated = load_n(y + i, n - i) / (1.0f + vexp(-v));
        if (is_silu)
            gated *= v;
        copy_n(y + i, &gated, n - i, sizeof *y);
    }
}

static void gate_row(void *arguments, int m) {
    const Call *a = arguments;
    const BlockWeights *c = a->block;
    int n = c->n_head * c->head_size, stride = 2 * n + 2 * c->n_kv_head * c->head_size;
    gate(a->out + (size_t)m * n, a->x + (size_t)m * stride, n, 0);
}

static int attention_size(const BlockWeights *c) {
    return ((2 + c->attn_gate) * c->n_head + 2 * c->n_kv_head) * c->head_size;
}

// x, out [M, C]; memory [M, attention_size]
static void mix_attention(const BlockWeights *c, const Pass *pass, const float *x, float *memory, float *out) {
    int M = pass->B * pass->T, q_size = c->n_head * c->head_size, threads = pass->threads;
    Call a = {.block = c, .pass = pass, .x = memory + (size_t)M * q_size, .out = memory};
    product(&c->qkv, x, M, a.x, threads);
    parallel(rope_cache_row, &a, M, q_size, threads);
    attention(c, pass, a.out, a.out);
    if (c->attn_gate)
        parallel(gate_row, &a, M, 8 * q_size, threads);
    product(&c->proj, a.out, M, out, threads);
}

// -------------------------------------------------------------------------------------------------
// mix_delta
//
//   q, k, v = silu(sum_j w_j x_j) over the inputs x of a node and its n - 1 nearest ancestors
//   q = q / sqrt(sum(q^2) + 1e-6) Dk^-0.5, k = k / sqrt(sum(k^2) + 1e-6)
//   decay = exp(A softplus(a + dt_bias));  beta = sigmoid(b)
//   u = beta (v - decay S^T k);  y = decay S^T q + (q.k) u;  S = decay S + k u^T
//   out = out_proj(norm(y) silu(z))
//
// As in recurrent/delta.py, but node by node in the order of plain decoding: a node's S is made from
// its parent's, and commit_delta repeats S = decay S + k u^T along the accepted path, with the same u.
// So bits do not depend on the tree. Columns of S are independent: a unit is a value head of a
// sequence, and takes STRIP columns at a time, of which it holds the S [Dk][STRIP] of all nodes.
//
// Memory traffic: S read here, read and written at commit.

typedef struct {
    const BlockWeights *block;
    const Pass *pass;
    float *qkvz, *qkv, *ab, *y;  // [M, ...]; ab: then decay, beta
} Delta;

INLINE int channels_of(const DeltaStates *s) {
    return 2 * s->n_key_head * s->key_size + s->n_head * s->value_size;
}

// The sequence of b in the layer's states; node 0 of row b in what it keeps of a tree
INLINE size_t state_at(const Pass *pass, int b) {
    return (size_t)pass->states.layer * pass->states.slots + slot_of(pass, b);
}
INLINE size_t tree_at(const Pass *pass, int b) {
    return ((size_t)pass->states.layer * pass->states.slots + b) * pass->states.nodes;
}

// The node before t on its path, below 0 for one of the history
INLINE int node_before(const Pass *pass, int b, int t) {
    if (!pass->ancestors || t < 0)
        return t - 1;
    uint64_t above = pass->ancestors[b * pass->T + t] & (((uint64_t)1 << t) - 1);
    return above ? 63 - __builtin_clzll(above) : -1;
}

// x [n] to length 1, times scale
static void unit_row(float *x, int n, float scale) {
    vf squares = {0};
    for (int i = 0; i < n; i += LANES)
        squares = fused(load_n(x + i, n - i), load_n(x + i, n - i), squares);
    scale /= sqrtf(sum_lanes(squares) + 1e-6f);
    for (int i = 0; i < n; i++)
        x[i] *= scale;
}

static void prepare_delta_row(void *arguments, int m) {
    const Delta *a = arguments;
    const BlockWeights *c = a->block;
    const DeltaStates *s = &a->pass->states;
    int H = s->n_head, Hk = s->n_key_head, Dk = s->key_size, C = channels_of(s), n = s->window;
    int width = C + H * s->value_size, b = m / a->pass->T, node = m % a->pass->T;
    const float *window[n];
    for (int i = 0, t = node; i < n; i++, t = node_before(a->pass, b, t))
        window[i] = t >= 0 ? a->qkvz + (size_t)(m - node + t) * width
            : s->history + (state_at(a->pass, b) * (n - 1) + n - 1 + t) * C;
    float *qkv = a->qkv + (size_t)m * C, *decay = a->ab + (size_t)m * 2 * H, *beta = decay + H;
    for (int i = 0; i < C; i += LANES) {
        vf sum = {0};
        for (int j = 0; j < n; j++)
            sum = fused(load_n(window[j] + i, C - i), load_n(c->conv + (size_t)j * C + i, C - i), sum);
        sum /= 1.0f + vexp(-sum);
        copy_n(qkv + i, &sum, C - i, sizeof *qkv);
    }
    for (int h = 0; h < 2 * Hk; h++)
        unit_row(qkv + h * Dk, Dk, h < Hk ? 1.0f / sqrtf(Dk) : 1);
    for (int h = 0; h < H; h++) {
        float rate = decay[h] + c->dt_bias[h];
        decay[h] = expf(c->A[h] * (rate > 20 ? rate : log1pf(expf(rate))));
        beta[h] = 1.0f / (1.0f + expf(-beta[h]));
    }
    if (a->pass->ancestors) {    // what commit_delta reads
        size_t at = tree_at(a->pass, b) + node;
        memcpy(s->inputs + at * C, window[0], C * sizeof *qkv);
        memcpy(s->keys + at * Hk * Dk, qkv + Hk * Dk, Hk * Dk * sizeof *qkv);
        memcpy(s->decay + at * H, decay, H * sizeof *decay);
    }
}

// Reads row m for `columns` columns of head h from `first` on, and makes its S, if not NULL, of the parent's
static void read_node(const Delta *a, int m, int h, int first, int columns, const float *parent, float *S) {
    const DeltaStates *s = &a->pass->states;
    int H = s->n_head, Hk = s->n_key_head, Dk = s->key_size, Dv = s->value_size, T = a->pass->T;
    const float *q = a->qkv + (size_t)m * channels_of(s), *k = q + Hk * Dk, *rates = a->ab + (size_t)m * 2 * H;
    const float *v = k + Hk * Dk + h * Dv + first;
    vf u[SUMS] = {{0}}, y[SUMS] = {{0}};
    float qk = 0, *out = a->y + ((size_t)m * H + h) * Dv + first;
    float *to = s->u + ((tree_at(a->pass, m / T) + m % T) * H + h) * Dv + first;
    q += h % Hk * Dk;
    k += h % Hk * Dk;
    for (int i = 0; i < Dk; i++) {
        qk += q[i] * k[i];
        UNROLL
        for (int j = 0; j < SUMS; j++) {
            vf row = load(parent + i * STRIP + j * LANES);
            u[j] = fused(splat(k[i]), row, u[j]);
            y[j] = fused(splat(q[i]), row, y[j]);
        }
    }
    for (int j = 0; j < SUMS; j++) {
        int n = columns - j * LANES;
        u[j] = fused(splat(-rates[h]), u[j], load_n(v + j * LANES, n)) * rates[H + h];
        y[j] = fused(splat(qk), u[j], rates[h] * y[j]);
        copy_n(out + j * LANES, &y[j], n, sizeof *out);
        if (a->pass->ancestors)
            copy_n(to + j * LANES, &u[j], n, sizeof *to);
    }
    for (int i = 0; S && i < Dk; i++) {
        UNROLL
        for (int j = 0; j < SUMS; j++) {
            vf row = rates[h] * load(parent + i * STRIP + j * LANES);
            store(S + i * STRIP + j * LANES, fused(splat(k[i]), u[j], row));
        }
    }
}

static void delta_head(void *arguments, int unit) {
    const Delta *a = arguments;
    const DeltaStates *s = &a->pass->states;
    int H = s->n_head, Dk = s->key_size, Dv = s->value_size, T = a->pass->T;
    int is_tree = a->pass->ancestors != NULL, b = unit / H, h = unit % H;
    size_t tile = (size_t)Dk * STRIP, next = is_tree ? tile : 0;  // a prompt's tokens share one S
    float *state = s->state + (state_at(a->pass, b) * H + h) * Dk * Dv;
    float *S = scratch(ROWS, (tile + T * next) * sizeof *S);  // of the text, then of nodes
    uint64_t inner = 0;          // nodes with children
    for (int t = 1; is_tree && t < T; t++)
        inner |= (uint64_t)1 << max(node_before(a->pass, b, t), 0);
    for (int first = 0; first < Dv; first += STRIP) {
        int columns = min(Dv - first, STRIP);
        for (int i = 0; i < Dk; i++)
            for (int j = 0; j < STRIP; j += LANES)
                store(S + i * STRIP + j, load_n(state + i * Dv + first + j, columns - j));
        for (int t = 0; t < T; t++) {
            float *parent = S + (1 + node_before(a->pass, b, t)) * next;
            float *own = !is_tree || inner >> t & 1 ? S + (1 + t) * next : NULL;
            read_node(a, b * T + t, h, first, columns, parent, own);
        }
        for (int i = 0; !is_tree && i < Dk; i++)
            memcpy(state + i * Dv + first, S + i * STRIP, columns * sizeof *S);
    }
}

static void finish_delta_row(void *arguments, int m) {
    const Delta *a = arguments;
    const DeltaStates *s = &a->pass->states;
    int C = channels_of(s), n = s->n_head * s->value_size;
    float *y = a->y + (size_t)m * n;
    for (int i = 0; i < n; i += s->value_size)
        norm_row(&a->block->norm, y + i, s->value_size, y + i);
    gate(y, a->qkvz + (size_t)m * (C + n) + C, n, 1);
}

// Moves `count` inputs to the end of a history [n - 1, C]: the path's, or without one all
static void move_history(const DeltaStates *s, float *history, const float *inputs, int stride,
                         const int64_t *path, int count) {
    int rows = s->window - 1, C = channels_of(s);
    for (int i = 0; i < rows; i++) {
        int from = i + count - rows;  // of the inputs
        size_t at = from >= 0 && path ? path[from] : from;
        memmove(history + i * C, from < 0 ? history + (i + count) * C : inputs + at * stride,
                C * sizeof *history);
    }
}

static int delta_size(const DeltaStates *s) {
    return 2 * (channels_of(s) + s->n_head * s->value_size + s->n_head);
}

// x, out [M, C]; memory [M, delta_size]. Without ancestors the states become those after the tokens.
static void mix_delta(const BlockWeights *c, const Pass *pass, const float *x, float *memory, float *out) {
    const DeltaStates *s = &pass->states;
    int T = pass->T, threads = pass->threads, C = channels_of(s), n = s->n_head * s->value_size;
    size_t M = (size_t)pass->B * T;
    Delta a = {c, pass, memory};
    a.qkv = a.qkvz + M * (C + n);
    a.ab = a.qkv + M * C;
    a.y = a.ab + M * 2 * s->n_head;
    product(&c->qkvz, x, M, a.qkvz, threads);
    product(&c->ab, x, M, a.ab, threads);
    parallel(prepare_delta_row, &a, M, 8 * C, threads);
    parallel(delta_head, &a, pass->B * s->n_head, (int64_t)T * s->key_size * s->value_size, threads);
    parallel(finish_delta_row, &a, M, 8 * n, threads);
    for (int b = 0; !pass->ancestors && b < pass->B; b++)
        move_history(s, s->history + state_at(pass, b) * (s->window - 1) * C,
                     a.qkvz + (size_t)b * T * (C + n), C + n, NULL, T);
    product(&c->out_proj, a.y, M, out, threads);
}

// -------------------------------------------------------------------------------------------------
// commit_delta

typedef struct {
    const Pass *pass;
    const int64_t *path, *count;
    int stride;
} Commit;

static void commit_head(void *arguments, int unit) {
    const Commit *a = arguments;
    Pass pass = *a->pass;
    const DeltaStates *s = &pass.states;
    int H = s->n_head, Hk = s->n_key_head, Dk = s->key_size, Dv = s->value_size, C = channels_of(s);
    int h = unit % H, b = unit / H % pass.B, count = a->count[b * a->stride];
    const int64_t *path = a->path + b * a->stride;
    pass.states.layer += unit / H / pass.B;
    size_t sequence = state_at(&pass, b), tree = tree_at(&pass, b);
    for (int i = 0; count && i < Dk; i++)
        for (int j = 0; j < Dv; j += LANES) {
            float *S = s->state + ((sequence * H + h) * Dk + i) * Dv + j;
            vf v = load_n(S, Dv - j);
            for (int p = 0; p < count; p++) {
                size_t node = tree + path[p], head = node * H + h;
                vf k = splat(s->keys[(node * Hk + h % Hk) * Dk + i]);
                v = fused(k, load_n(s->u + head * Dv + j, Dv - j), v * s->decay[head]);
            }
            copy_n(S, &v, Dv - j, sizeof *S);
        }
    if (count && h == 0)
        move_history(s, s->history + sequence * (s->window - 1) * C, s->inputs + tree * C, C, path, count);
}

// Applies the accepted nodes, path[b * stride + i] for i < count[b * stride], to the states
void commit_delta(const Pass *pass, int layers, const int64_t *path, const int64_t *count, int stride) {
    Commit a = {pass, path, count, stride};
    int64_t size = pass->states.key_size * pass->states.value_size;
    parallel(commit_head, &a, layers * pass->B * pass->states.n_head, size, pass->threads);
}

// -------------------------------------------------------------------------------------------------
// run_blocks: consecutive model.Blocks

// Whether some token has no row in the cache or in the rope table
static int lacks_rows(const Pass *pass) {
    if (pass->states.state && pass->ancestors && pass->T > pass->states.nodes)
        return 1;
    for (int b = 0; b < pass->B; b++)
        if (length_of(pass, b) < 0 || start_of(pass, b) > pass->rows - pass->T)
            return 1;
    for (int m = 0; pass->rope_rows && m < pass->B * pass->T; m++)
        if (pass->positions[m] < 0 || pass->positions[m] >= pass->rope_rows)
            return 1;
    return 0;
}

// x [M, C]: residual stream, in place; normed [M, C]: its norm; the pass goes on to the next block. A
// layer whose qkv reads pairs [2 C] finds them in normed [M, 2 C]. Returns 1 if a cache has no room.
int run_blocks(const BlockWeights *blocks, int count, const NormWeights *last, Pass *pass, float *x,
               float *normed) {
    int M = pass->B * pass->T, C = blocks->n_embd, inner = blocks->n_inner, threads = pass->threads;
    if (lacks_rows(pass))
        return 1;
    int size = C + 3 * inner + max(attention_size(blocks), delta_size(&pass->states));
    float *delta = scratch(PASS, (size_t)M * size * sizeof *delta), *up = delta + (size_t)M * C;
    float *hidden = up + (size_t)M * 2 * inner, *memory = hidden + (size_t)M * inner;
    NormWeights none = {0};
    Call add = {.post = &none, .norm = &blocks->attn_norm, .x = x, .out = normed, .block = blocks};
    if (blocks->qkv.k != 2 * C)
        parallel(add_norm_row, &add, M, C, threads);
    add.delta = delta;
    for (const BlockWeights *c = blocks; c < blocks + count; c++) {
        Call act = {.block = c, .x = up, .out = hidden};
        (c->conv ? mix_delta : mix_attention)(c, pass, normed, memory, delta);
        add.post = &c->attn_post_norm;
        add.norm = &c->mlp_norm;
        parallel(add_norm_row, &add, M, C, threads);
        product(&c->up, normed, M, up, threads);
        parallel(glu_row, &act, M, 8 * inner, threads);
        product(&c->down, hidden, M, delta, threads);
        add.post = &c->mlp_post_norm;
        add.norm = c + 1 < blocks + count ? &c[1].attn_norm : last;
        parallel(add_norm_row, &add, M, C, threads);
        if (c->conv)
            pass->states.layer++;
        else
            pass->kv = (char *)pass->kv + pass->layer_stride * (pass->bfloat16 ? 2 : 4);
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// sample
//
//   argmax_t(logits[m, t] / temperature[b] + gumbel(seed[b], sequence[b], position[m] + 1, t)), where
//   b is row m's sequence; argmax_t(logits[m, t]) at temperature 0. The lowest t of equals, never NaN

typedef struct { float score; int64_t key; int at; } Entry;  // by score, then the lower key

INLINE int outranks(Entry a, Entry b) {
    return a.score > b.score || (a.score == b.score && a.key < b.key);
}

// Inserts an entry into the n best, sorted, if it is one of them; scores are not NaN
static void insert(Entry *best, int *count, int n, Entry entry) {
    if (*count == n && (n == 0 || !outranks(entry, best[n - 1])))
        return;
    int i = *count < n ? (*count)++ : n - 1;
    for (; i > 0 && outranks(entry, best[i - 1]); i--)
        best[i] = best[i - 1];
    best[i] = entry;
}

typedef struct {
    const float *logits;         // [M, V]
    int V, T, parts;             // T: rows per sequence
    int first;                   // index of the first row
    const int32_t *slots;        // as in Pass
    const float *temperature;    // by slot; NULL: all 0
    const int64_t *seed, *sequence, *position;  // by slot, by slot, by row
    const int32_t *masks;        // [rows, ceil(V / 32)]: bits of the allowed tokens; NULL: all
    Entry *best;                 // [M, parts]
} Argmax;

static uint64_t splitmix64(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

static uint64_t noise_key(int64_t seed, int64_t sequence, int64_t position) {
    uint64_t key = splitmix64(seed + 0x9e3779b97f4a7c15);
    return splitmix64(splitmix64(key + sequence) + position);
}

INLINE vf gumbel(uint64_t key, vi tokens) {  // as kernels.gumbel
    vu x = (vu)tokens ^ (uint32_t)key;
    x = (x ^ x >> 16) * 0x7feb352d ^ (uint32_t)(key >> 32);
    x = (x ^ x >> 15) * 0x846ca68b;
    x = (x ^ x >> 16) >> 8 | 1;
    return -vlog(-vlog(__builtin_convertvector(x, vf) * 0x1p-24f));
}

static void best_of_part(void *arguments, int unit) {
    const Argmax *a = arguments;
    int m = unit / a->parts, start = unit % a->parts * PART, end = min(start + PART, a->V);
    int row = a->first + m, b = a->slots ? a->slots[row / a->T] : row / a->T;
    float temperature = a->temperature ? a->temperature[b] : 0;
    uint64_t key = 0;
    if (temperature != 0)
        key = noise_key(a->seed[b], a->sequence[b], a->position[row] + 1);
    vf best = splat(-INFINITY);
    vi at = start + NUMBERS;
    const int32_t *mask = a->masks ? a->masks + (size_t)row * ((a->V + 31) / 32) : NULL;
    for (int i = start; i < end; i += LANES) {
        vf score = load_n(a->logits + (size_t)m * a->V + i, end - i);
        if (mask)
            score = select_lanes((mask[i / 32] >> (i % 32 + NUMBERS) & 1) != 0, score,
                                 splat(-INFINITY));
        if (temperature != 0)
            score = score / temperature + gumbel(key, NUMBERS + i);
        vi larger = (score > best) & (NUMBERS < end - i);
        best = select_lanes(larger, score, best);
        at = (vi)select_lanes(larger, (vf)(NUMBERS + i), (vf)at);
    }
    for (int i = 0, count = 0; i < LANES; i++)
        insert(a->best + unit, &count, 1, (Entry){best[i], at[i], at[i]});
}

// Samples the tokens that follow M tokens at these positions. Their logits are computed from x for a
// few sequences at a time, to save memory; without inputs (w->k = 0), x [M, n] are the logits.
// temperature NULL: greedy
void sample(const Linear *w, const float *x, int M, int T, const int32_t *slots,
            const float *temperature, const int64_t *seed, const int64_t *sequence,
            const int64_t *position, const int32_t *masks, int64_t *out, int threads) {
    int step = max(MAX_TREE / T, 1) * T;
    float *logits = w->k ? scratch(LOGITS, (size_t)min(M, step) * w->n * sizeof *logits) : NULL;
    for (int m = 0; m < M; m += step) {
        int rows = min(M - m, step);
        if (w->k)
            product(w, x + (size_t)m * w->k, rows, logits, threads);
        Argmax a = {w->k ? logits : x + (size_t)m * w->n, w->n, T, .first = m, .slots = slots,
                    .temperature = temperature, .seed = seed, .sequence = sequence,
                    .position = position, .masks = masks};
        a.parts = (a.V + PART - 1) / PART;
        a.best = scratch(BEST, (size_t)rows * a.parts * sizeof *a.best);
        parallel(best_of_part, &a, rows * a.parts, PART, threads);
        for (int row = 0; row < rows; row++) {
            Entry *best = a.best + row * a.parts;
            for (int i = 1, count = 1; i < a.parts; i++)
                insert(best, &count, 1, best[i]);
            out[m + row] = best->at;
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Draft heads: one depth of the beam search in clover.DraftHeads
//
//   s = s + cos(Wq norm(s), Wk e) * (Wv e), per attention head; or s + W [norm(s), e] + b
//   z = s + silu(W s + b), or W [s, e] + b;  log-probabilities = log_softmax(rows norm(z))
//
// The LAYER of EAGLE-3 or MTP heads (drafters/) runs as an augmenting block, over beams too:
//
//   s = Layer([norm(e), norm(s)]), or Block(W [norm(e), norm(s)]);  z = s
//
// Rows are beams, or sequences where all beams are equal: at depth 0 and if heads read no tokens.

typedef struct {                 // arguments of the functions below
    const Heads *heads;
    const HeadWeights *head;
    float *state, *e, *x, *y, *kv;  // [M, C], x and kv [M, 2 C]
    float *logits, *logprobs;    // [BEAMS, V], [M, W]
    int64_t *proposed;           // [M, W]: tokens
    int first, W;                // first: the row of logits[0]
    float *temperature;          // [M]
    uint64_t *keys;              // [M], of the sampler's noise
} Beams;

// Divides memory among the buffers of M rows
static void set_rows(Beams *a, float *memory, int M) {
    int C = a->heads->n_embd;
    a->state = memory;
    a->e = a->state + M * C;
    a->y = a->e + M * C;
    a->x = a->y + M * C;
    a->kv = a->x + M * 2 * C;
}

static void before_mix_row(void *arguments, int m) {
    const Beams *a = arguments;
    int C = a->heads->n_embd, width = a->heads->mix >= CONCAT ? 2 * C : C;
    int at = a->heads->mix == LAYER ? C : 0;  // of the state in its pair
    norm_row(&a->head->norm, a->state + (size_t)m * C, C, a->x + (size_t)m * width + at);
    if (width > C)
        norm_row(&a->head->embed_norm, a->e + (size_t)m * C, C, a->x + (size_t)m * width + C - at);
}

static float dot(const float *a, const float *b, int n) {
    vf sum = {0};
    for (int i = 0; i < n; i += LANES)
        sum += load_n(a + i, n - i) * load_n(b + i, n - i);
    return sum_lanes(sum);
}

static void mix_row(void *arguments, int m) {
    const Beams *a = arguments;
    int C = a->heads->n_embd, D = C / a->heads->n_head;
    float *state = a->state + (size_t)m * C, *y = a->y + (size_t)m * C;
    const float *key = a->kv + (size_t)m * 2 * C, *value = key + C;
    const float *normed = a->x + (size_t)m * 2 * C + C;  // of a LAYER
    for (int i = 0; i < C && a->heads->mix == CONCAT; i++)
        state[i] += y[i];
    if (a->heads->mix == LAYER && (a->head->mix.k || a->heads->norm_before_residual))
        memcpy(state, a->head->mix.k ? y : normed, C * sizeof *state);
    for (int h = 0; h < C && a->heads->mix == ATTENTION; h += D) {
        float norms = sqrtf(dot(y + h, y + h, D)) * sqrtf(dot(key + h, key + h, D));
        float cosine = dot(y + h, key + h, D) / fmaxf(norms, 1e-16f);
        for (int i = h; i < h + D; i++)
            state[i] += cosine * value[i];
    }
}

// Mixes tokens [M] into the states of their rows
static void mix(Beams *a, const int64_t *tokens, int M, int threads) {
    const Heads *h = a->heads;
    int C = h->n_embd;
    unpack_rows(&h->table, tokens, M, a->e);
    for (size_t i = 0; i < (size_t)M * C; i++)
        a->e[i] *= h->scale;
    if (h->mix == NO_MIX)
        return;
    parallel(before_mix_row, a, M, C, threads);
    if (a->head->mix.k)
        product(&a->head->mix, a->x, M, a->y, threads);
    if (h->mix == ATTENTION)
        product(&a->head->key_value, a->e, M, a->kv, threads);
    parallel(mix_row, a, M, C, threads);
}

static void last_norm_row(void *arguments, int m) {
    const Beams *a = arguments;
    int C = a->heads->n_embd, is_layer = a->heads->mix == LAYER;
    float *y = (is_layer ? a->state : a->y) + (size_t)m * C;
    for (int i = 0; !is_layer && !a->heads->linear && i < C; i += LANES) {
        vf v = load_n(y + i, C - i);
        v = v / (1.0f + vexp(-v)) + load_n(a->state + (size_t)m * C + i, C - i);
        copy_n(y + i, &v, C - i, sizeof(float));
    }
    norm_row(&a->heads->norm, y, C, a->x + (size_t)m * C);
}

static void best_tokens_row(void *arguments, int row) {
    const Beams *a = arguments;
    int V = a->heads->rows.n, W = a->W, count = 0;
    float *x = a->logits + (size_t)row * V, temperature = a->temperature[a->first + row];
    size_t out = (size_t)(a->first + row) * W;
    vf sum = {0};
    for (int i = 0; temperature > 0 && i < V; i += LANES) {
        vi tokens = NUMBERS + i;
        if (a->heads->ids)
            copy_n(&tokens, a->heads->ids + i, V - i, sizeof(int32_t));
        vf v = load_n(x + i, V - i) + temperature * gumbel(a->keys[a->first + row], tokens);
        copy_n(x + i, &v, V - i, sizeof *x);
    }
    Entry top[MAX_TREE] = {{0}};
    for (int start = 0; start < V; start += SKIP) {
        int end = min(start + SKIP, V);
        vf best = splat(-INFINITY);
        for (int i = start; i < end; i += LANES)
            best = larger(load_n(x + i, V - i), best);
        if (count == W && max_lanes(best) <= top[W - 1].score)
            continue;
        for (int i = start; i < end; i++)
            if (count < W || x[i] > top[W - 1].score)
                insert(top, &count, W, (Entry){x[i] == x[i] ? x[i] : -INFINITY, i, i});
    }
    for (int i = 0; i < V; i += LANES)
        sum += select_lanes(NUMBERS < V - i, vexp(load_n(x + i, V - i) - top->score), splat(0));
    float log_sum = top->score + logf(sum_lanes(sum));
    for (int i = 0; i < W; i++) {
        a->logprobs[out + i] = top[i].score - log_sum;
        a->proposed[out + i] = a->heads->ids ? a->heads->ids[top[i].at] : top[i].at;
    }
}

// Computes x, what the LM head reads, from the states of M beams, which it updates, and their tokens
static void next_states(Beams *a, const int64_t *tokens, int M, int threads) {
    const Heads *h = a->heads;
    int C = h->n_embd, is_layer = h->mix == LAYER;  // which has run
    if (!is_layer && (h->mix != NO_MIX || h->linear))
        mix(a, tokens, M, threads);
    for (int m = 0; h->linear && m < M; m++) {
        memcpy(a->x + (size_t)m * 2 * C, a->state + (size_t)m * C, C * sizeof *a->x);
        memcpy(a->x + (size_t)m * 2 * C + C, a->e + (size_t)m * C, C * sizeof *a->x);
    }
    if (!is_layer)
        product(&a->head->project, h->linear ? a->x : a->state, M, a->y, threads);
    parallel(last_norm_row, a, M, 4 * C, threads);
}

// The next states of a draft head [M, C], in place, and what the LM head reads, normed [M, C]
void run_draft_head(const Heads *h, int number, float *state, const int64_t *tokens, int M,
                    float *normed, int threads) {
    size_t size = (size_t)M * h->n_embd * sizeof(float);
    Beams a = {.heads = h, .head = h->heads + number};
    set_rows(&a, scratch(PATHS, 7 * size), M);
    a.state = state;
    next_states(&a, tokens, M, threads);
    memcpy(normed, a.x, size);
}

// Computes logprobs and proposed from the states of M beams, which it updates, and their tokens
static void propose(Beams *a, const int64_t *tokens, int M, int threads) {
    const Heads *h = a->heads;
    int C = h->n_embd;
    next_states(a, tokens, M, threads);
    for (a->first = 0; a->first < M; a->first += BEAMS) {
        int rows = min(M - a->first, BEAMS);
        product(&h->rows, a->x + (size_t)a->first * C, rows, a->logits, threads);
        parallel(best_tokens_row, a, rows, h->rows.n, threads);
    }
}

// -------------------------------------------------------------------------------------------------
// A step: one function for each stage of generate.Decoder, on the sequences in some of the slots

// Whether the grammar of sequence b allows a token after the root
static int is_allowed(const Step *s, int b, int64_t token) {
    return s->first_masks[(size_t)b * s->words + token / 32] >> token % 32 & 1;
}

// Number of tokens that lookup proposes
static int chain_size(const Step *s) {
    return s->tree_size ? min(s->tree_size - 1, MAX_CHAIN) : MAX_CHAIN;
}

// generate.ngram_lookup: fills chain [1 + MAX_CHAIN] from text [last + 1]
static void look_up(const int32_t *text, int last, int64_t *chain) {
    int match = 0;
    chain[0] = 0;
    for (int end = last - 1; end >= 0 && chain[0] < 4; end--) {
        int length = 0;
        while (length < 4 && length <= end && text[end - length] == text[last - length])
            length++;
        if (length > chain[0]) {
            chain[0] = length;
            match = end;
        }
    }
    for (int i = 0; i < MAX_CHAIN; i++)
        chain[1 + i] = chain[0] ? text[match + 1 + i % (last - match)] : -1;
}

// Fills the chain of sequence b: forced text, else lookup's tokens, if its grammar allows the first
static void fill_chain(const Step *s, int b, int64_t *chain) {
    int slot = slot_of(&s->trees, b);
    const int64_t *forced = s->forced ? s->forced + b * (1 + MAX_CHAIN) : NULL;
    chain[0] = 0;
    if (forced && forced[0])
        memcpy(chain, forced, (1 + MAX_CHAIN) * sizeof *chain);
    else if (s->with_lookup)
        look_up(s->history + slot * s->history_stride, s->lengths[slot], chain);
    if (chain[0] && s->first_masks && !is_allowed(s, b, chain[1]))
        chain[0] = 0;
}

// -------------------------------------------------------------------------------------------------
// draft: clover.build_tree of the candidates of heads and lookup

typedef struct {                 // a candidate
    float p;                     // acceptance probability; -1: no candidate
    int32_t source, parent, depth;  // parent: index in the pool, -1: the root
    int64_t token;
} Candidate;

typedef struct {
    Step *s;
    Beams beams;
    float *joint;                // [B, K, n], like tokens and parents: see `select_candidates`
    int64_t *tokens, *parents, *guessed;  // guessed [M]: last tokens of the beams
    int n, M, depths;            // M: rows of the next head; depths: drafted so far
} Draft;

static float probability(float p) { return p > 0 ? fminf(p, 1) : 0; }

// Fills the pool of sequence b: the heads' candidates, then tokens that only lookup proposes.
// Returns its size.
static int fill_pool(const Draft *d, int b, Candidate *pool) {
    const Step *s = d->s;
    int slot = slot_of(&s->trees, b), n = d->n, count = 0, above = -1;
    const float *chances = s->chances + (s->temperature[slot] > 0) * SOURCES;
    for (; count < d->depths * n; count++) {
        size_t at = (size_t)b * s->K * n + count;
        int depth = count / n, parent = depth ? (depth - 1) * n + d->parents[at] : -1;
        float x = fminf(fmaxf(-4 * d->joint[at], 0), BINS - 1);
        int bin = min(x, BINS - 2);
        float low = chances[bin + 1];
        float p = fmaxf(chances[bin] + (low - chances[bin]) * (x - bin), low);
        p = depth ? fminf(probability(p), pool[max(parent, 0)].p) : probability(p);
        if (d->joint[at] == -INFINITY)  // unused, or forbidden by a mask
            p = -1;
        pool[count] = (Candidate){p, x, parent, depth + 1, d->tokens[at]};
    }
    const int64_t *chain = s->chain + b * (1 + MAX_CHAIN);
    int length = chain[0] ? chain_size(s) : 0;
    float p = 1, chance = probability(chances[BINS + chain[0]]);
    for (int j = 0; j < length && chain[1 + j] >= 0; j++) {
        int i = j * n, end = j < d->depths ? i + n : i;
        while (i < end && (pool[i].p < 0 || pool[i].token != chain[1 + j]
                           || pool[i].parent != above))
            i++;
        p *= chance;
        if (i == end) {
            i = count;
            pool[count++] = (Candidate){-1, 0, above, j + 1, chain[1 + j]};
        }
        if (p > pool[i].p) {
            pool[i].p = p;
            pool[i].source = BINS + chain[0];
        }
        above = i;
    }
    return count;
}

// Writes the tree of sequence b: the root, the n - 1 likeliest candidates, best first, their parents
// as nodes, and spare nodes of depth 0
static void rank_nodes(const Draft *d, int b, int n, Candidate *nodes) {
    Candidate pool[MAX_CANDIDATES];
    Entry best[MAX_TREE];
    uint8_t node_of[MAX_CANDIDATES];
    int ranked = 0, count = n > 1 ? fill_pool(d, b, pool) : 0;
    for (int i = 0; i < count; i++)
        if (pool[i].p >= 0) {
            int64_t key = (int64_t)pool[i].depth << 56 | pool[i].token << 16 | i;
            insert(best, &ranked, n - 1, (Entry){pool[i].p, key, i});
        }
    nodes[0] = (Candidate){1, -1, 0, 0, d->s->root[slot_of(&d->s->trees, b)]};
    for (int i = 1; i < n; i++) {
        if (i > ranked) {
            nodes[i] = (Candidate){0, -1, 0, 0, 0};
            continue;
        }
        nodes[i] = pool[best[i - 1].at];
        nodes[i].parent = nodes[i].parent < 0 ? 0 : node_of[nodes[i].parent];
        node_of[best[i - 1].at] = i;
    }
}

// The T with the most expected tokens per second. nodes [B, LARGEST]
static int choose_size(const Step *s, const Candidate *nodes) {
    float tokens = 0, best_rate = 0;
    int best = 1;
    for (int T = 1; T <= LARGEST; T++) {
        float more = 0;
        for (int b = 0; b < s->trees.B; b++)
            more += nodes[b * LARGEST + T - 1].p;
        tokens += more;
        if (more > 0 && tokens / s->seconds[T] > best_rate) {  // 0: spare nodes
            best_rate = tokens / s->seconds[T];
            best = T;
        }
    }
    return best;
}

// The largest number of committed rows, at most `most`, that the heads have not read in a slot
static int rows_behind(const Step *s, const int32_t *slots, int B, int most) {
    int rows = 0;
    for (int b = 0; b < B; b++)
        rows = max(rows, s->lengths[slots[b]] - s->heads_lengths[slots[b]]);
    return min(rows, most);
}

// Runs the augmenting blocks, which update a->state [B, T, C]. rows [3, B, T]: tokens that follow each
// row, positions, ancestors. Returns 1 if the blocks' cache has no room.
static int augment(const Step *s, Beams *a, Pass pass, int B, int T, const int64_t *rows) {
    NormWeights none = {0};
    pass.B = B;
    pass.T = T;
    pass.positions = rows + B * T;
    pass.ancestors = rows + 2 * B * T;
    a->head = a->heads->mix_in;
    if (a->head)
        mix(a, rows, B * T, pass.threads);
    return s->n_augment && run_blocks(s->augment, s->n_augment, &none, &pass, a->state, a->x);
}

// Runs `augment` over the next T committed rows of slots, and writes `state`, what the heads draft
// from. Returns 1 if their cache has no room.
static int read_rows(Step *s, const int32_t *slots, int B, int T) {
    Pass pass = s->paths;
    const Heads *h = s->heads;
    int C = h->n_embd, bfloat16 = pass.bfloat16;
    size_t rows = (size_t)B * T;
    int64_t *tokens = scratch(PATHS, rows * (3 * sizeof *tokens + 7 * C * sizeof(float)));
    int64_t *positions = tokens + rows, *ancestors = positions + rows;
    Beams a = {.heads = h};
    set_rows(&a, (float *)(ancestors + rows), rows);
    pass.slots = slots;
    for (int m = 0; m < B * T; m++) {
        int slot = slots[m / T], j = m % T, at = s->heads_lengths[slot] + j;
        positions[m] = at;
        ancestors[m] = UINT64_MAX >> (63 - j);  // a path has no branches
        at = min(at, s->lengths[slot] - 1);  // -1 in a slot without committed rows
        tokens[m] = s->history[slot * s->history_stride + at + 1];
        read_row(s->hidden_rows, slot * s->hidden_stride + (size_t)max(at, 0) * C, C, bfloat16,
                 a.state + (size_t)m * C);
    }
    if (augment(s, &a, pass, B, T, tokens))
        return 1;
    for (int b = 0; b < B; b++) {
        int slot = slots[b], count = min(s->lengths[slot] - s->heads_lengths[slot], T);
        if (count > 0) {
            norm_row(&h->state_norm, a.state + (b * T + count - 1) * C, C, a.y);
            write_row(s->state, (size_t)slot * C, a.y, C, bfloat16);
        }
        s->heads_lengths[slot] += count;
    }
    return 0;
}

// Lets the heads read all committed rows: one by one the slots whose rows no single step wrote, as
// after a prompt, then all together
static int catch_up(Step *s) {
    const int32_t *slots = s->trees.slots;
    int B = s->trees.B, path = MAX_CHAIN + 1;
    s->drafted[1] = rows_behind(s, slots, B, INT32_MAX);
    for (int b = 0; b < B; b++)
        for (int T; (T = rows_behind(s, slots + b, 1, MAX_TREE)) > path;)
            if (read_rows(s, slots + b, 1, T))
                return 1;
    int T = rows_behind(s, slots, B, path);
    return T && read_rows(s, slots, B, T);
}

// clover.extend_candidates: fills the next depth of joint, tokens and parents
static void select_candidates(Draft *d) {
    const Beams *a = &d->beams;
    int B = d->s->trees.B, W = a->W, n = d->n, depth = d->depths;
    for (int b = 0; b < B; b++) {
        size_t out = ((size_t)b * d->s->K + depth) * n;
        Entry best[MAX_TREE];
        int count = 0;
        for (int i = 0; i < (depth ? W * W : W); i++) {
            size_t at = ((size_t)b * (d->M / B) + (d->M > B ? i / W : 0)) * W + i % W;
            float logprob = a->logprobs[at];
            if (!(logprob <= 0))
                logprob = logprob > 0 ? 0 : -INFINITY;  // NaN comes last
            float above = depth ? d->joint[out - n + i / W] : 0;
            insert(best, &count, n, (Entry){above + logprob, a->proposed[at] << 16 | i, i});
        }
        for (int i = 0; i < n; i++) {
            d->joint[out + i] = i < count ? best[i].score : -INFINITY;
            d->tokens[out + i] = i < count ? best[i].key >> 16 : 0;
            d->parents[out + i] = i < count ? best[i].at / W : -1;
        }
    }
}

// Runs `augment` over the beams, whose rows follow those of earlier depths
static int augment_beams(Draft *d) {
    const Step *s = d->s;
    Pass pass = s->paths;
    int W = s->W, M = d->M;
    int64_t *tokens = scratch(PATHS, 3 * M * sizeof *tokens);
    int64_t *positions = tokens + M, *ancestors = positions + M;
    pass.first = (d->depths - 1) * W;
    for (int m = 0; m < M; m++) {
        tokens[m] = d->guessed[m];
        positions[m] = length_of(&pass, m / W) + d->depths - 1;
        ancestors[m] = 0;
        for (int depth = d->depths - 1, beam = m % W; depth >= 0; depth--) {
            ancestors[m] |= (uint64_t)1 << (depth * W + beam);
            beam = d->parents[((size_t)(m / W) * s->K + depth) * d->n + beam];
        }
    }
    return augment(s, &d->beams, pass, M / W, W, tokens);
}

// Drafts the next depth. Returns 1 if the heads' cache has no room.
static int draft_depth(Draft *d) {
    Step *s = d->s;
    Beams *a = &d->beams;
    const Heads *h = s->heads;
    int B = s->trees.B, C = h->n_embd, depth = d->depths, W = s->W, threads = s->trees.threads;
    int reads = h->mix != NO_MIX || h->linear;
    for (int b = 0; depth == 0 && b < B; b++) {
        int slot = slot_of(&s->trees, b);
        d->guessed[b] = s->root[slot];
        read_row(s->state, (size_t)slot * C, C, s->trees.bfloat16, a->state + (size_t)b * C);
    }
    if (depth && reads) {
        for (int i = 0; i < B * W; i++) {  // the beams that continue
            size_t at = ((size_t)(i / W) * s->K + depth - 1) * d->n + i % W;
            const float *from = h->norm_output ? a->x : a->state;
            from += (i / W * (d->M / B) + d->parents[at]) * C;
            memcpy(a->y + (size_t)i * C, from, C * sizeof *from);
            d->guessed[i] = d->tokens[at];
        }
        d->M = B * W;
        memcpy(a->state, a->y, (size_t)d->M * C * sizeof *a->y);
    }
    if (depth && h->mix == LAYER && augment_beams(d))
        return 1;
    for (int m = 0; m < d->M; m++) {
        int slot = slot_of(&s->trees, m / (d->M / B));
        a->temperature[m] = s->temperature[slot];
        a->keys[m] = noise_key(s->seed[slot], s->sequence[slot], s->lengths[slot] + depth + 1);
    }
    a->head = h->heads + min(depth, h->n_weights - 1);
    propose(a, d->guessed, d->M, threads);
    for (int i = 0; depth == 0 && s->first_masks && i < B * W; i++)
        if (!is_allowed(s, i / W, a->proposed[i]))
            a->logprobs[i] = -INFINITY;
    select_candidates(d);
    d->depths++;
    return 0;
}

// Allocates the candidates of K heads
static void begin_heads(Draft *d) {
    Step *s = d->s;
    int B = s->trees.B, C = s->heads->n_embd, W = s->W;
    d->n = min(W * W, MAX_TREE - 1);
    size_t rows = (size_t)B * W, found = (size_t)B * s->K * d->n;
    size_t integers = rows * (2 + W) + 2 * found, logits = min(rows, BEAMS) * s->heads->rows.n;
    d->guessed = scratch(DRAFT, integers * sizeof *d->guessed
                         + (logits + found + rows * (7 * C + W + 1)) * sizeof(float));
    d->tokens = d->guessed + rows * (1 + W);
    d->parents = d->tokens + found;
    Beams *a = &d->beams;
    *a = (Beams){.heads = s->heads, .W = W, .proposed = d->guessed + rows};
    a->keys = (uint64_t *)(d->parents + found);
    d->joint = (float *)(a->keys + rows);
    set_rows(a, d->joint + found, rows);
    a->logprobs = a->kv + rows * 2 * C;
    a->logits = a->logprobs + rows * W;
    a->temperature = a->logits + logits;
    d->M = B;
}

// Writes the first T nodes of sequence b to the step's tree, positions and expected tokens
static void write_tree(Step *s, int b, const Candidate *nodes) {
    int T = s->T, length = length_of(&s->trees, b);
    size_t plane = (size_t)s->trees.B * T;
    int64_t *tree = s->tree + b * T, *ancestors = tree + 3 * plane;
    for (int i = 0; i < T; i++) {
        int is_spare = i > 0 && nodes[i].depth == 0;
        tree[i] = nodes[i].token;
        tree[plane + i] = nodes[i].parent;
        tree[2 * plane + i] = nodes[i].depth;
        ancestors[i] = is_spare ? 0 : (int64_t)((uint64_t)1 << i);
        if (i > 0 && !is_spare)
            ancestors[i] |= ancestors[nodes[i].parent];
        tree[4 * plane + i] = nodes[i].source;
        s->probabilities[b * T + i] = nodes[i].p;
        s->positions[b * T + i] = length + nodes[i].depth;
        s->drafted[0] += nodes[i].p;
    }
}

// Fills `tree` and `positions`. Returns 1 if a cache has no room.
int step_draft(Step *s) {
    Draft d = {.s = s};
    int B = s->trees.B, most = s->tree_size ? s->tree_size : LARGEST;
    for (int b = 0; b < B; b++)
        fill_chain(s, b, s->chain + b * (1 + MAX_CHAIN));
    s->drafted[0] = s->drafted[1] = 0;
    if (s->depths && catch_up(s))
        return 1;
    if (s->depths)
        begin_heads(&d);
    while (d.depths < s->depths)
        if (draft_depth(&d))
            return 1;
    Candidate *nodes = scratch(NODES, (size_t)B * most * sizeof *nodes);
    for (int b = 0; b < B; b++)
        rank_nodes(&d, b, most, nodes + b * most);
    s->T = s->trees.T = s->tree_size ? s->tree_size : choose_size(s, nodes);
    s->P = min(s->T, 1 + max(s->K, MAX_CHAIN));
    for (int b = 0; b < B; b++)
        write_tree(s, b, nodes + b * most);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// verify, sample, accept, commit

// Fills `x`, `normed`, `hidden` and `states`. Returns 1 for a token out of range or a full cache.
int step_verify(Step *s) {
    Pass pass = s->trees;
    int M = pass.B * pass.T, n = M * s->blocks->n_embd;
    pass.positions = s->positions;
    pass.ancestors = s->tree + 3 * M;
    if (s->embed.k && unpack_rows(&s->embed, s->tree, M, s->x))
        return 1;
    if (s->embed.k && s->hidden) {  // rounds to bfloat16, the model's dtype
        write_row(s->hidden, 0, s->x, n, 1);
        read_row(s->hidden, 0, n, 1, s->x);
    }
    for (int i = 0, first = 0; first < s->n_blocks; first = s->stops[i++]) {
        if (run_blocks(s->blocks + first, s->stops[i] - first, &s->norm, &pass, s->x, s->normed))
            return 1;
        if (s->states)
            write_row(s->states, (size_t)i * n, s->x, n, pass.bfloat16);
    }
    if (s->hidden)
        write_row(s->hidden, 0, s->x, n, 1);
    return 0;
}

void step_sample(Step *s) {
    const float *temperature = s->noise ? s->temperature : NULL;
    sample(&s->head, s->normed, s->trees.B * s->T, s->T, s->trees.slots, temperature, s->seed,
           s->sequence, s->positions, s->masks, s->target, s->trees.threads);
}

// generate.accept_path and engine.acceptance.count_nodes
void step_accept(Step *s) {
    int T = s->T, P = s->P;
    size_t plane = (size_t)s->trees.B * T;
    for (int b = 0; b < s->trees.B; b++) {
        const int64_t *tree = s->tree + b * T, *parents = tree + plane;
        const int64_t *ancestors = tree + 3 * plane, *sources = tree + 4 * plane;
        const int64_t *target = s->target + b * T;
        const int64_t *chain = s->chain + b * (1 + MAX_CHAIN);
        int64_t *out = s->accepted + b * (3 * P + 2), *path = out + P;
        double *counts = s->counts + 2 * SOURCES * (s->temperature[slot_of(&s->trees, b)] > 0);
        int count = 1, right = 0, active = s->active[slot_of(&s->trees, b)];
        path[0] = 0;
        for (int i = 1; i < T && ancestors[i]; i++) {
            int is_next = count < P && parents[i] == path[count - 1]
                && tree[i] == target[parents[i]];
            if (is_next)
                path[count++] = i;
            if (sources[i] < BINS && active == 1) {
                counts[2 * sources[i]] += is_next;
                counts[2 * sources[i] + 1]++;
            }
        }
        for (int i = 0; i < P; i++) {
            path[i] = i < count ? path[i] : 0;
            out[i] = target[path[i]];
            out[2 * P + i] = sources[path[i]];
        }
        out[3 * P] = active ? count : 0;
        out[3 * P + 1] = active ? count - 1 : 0;
        int counted = active == 1 || (active == 2 && chain[0] == SCHEMA), length = 0;
        while (chain[0] && counted && length < min(chain_size(s), count) && chain[1 + length] >= 0)
            length++;
        while (right < length && chain[1 + right] == out[right])
            right++;
        if (length) {
            counts[2 * (BINS + chain[0])] += right;
            counts[2 * (BINS + chain[0]) + 1] += right + (right < length);
        }
    }
}

// Moves the keys or values of a layer, for each sequence's accepted nodes, to the front of its tree
static void move_path(void *arguments, int unit) {
    const Step *s = arguments;
    const Pass *pass = &s->trees;
    int D = s->blocks->head_size, bytes = pass->bfloat16 ? 2 : 4, size = D * bytes;
    for (int b = 0; b < pass->B; b++) {
        const int64_t *row = s->accepted + b * (3 * s->P + 2), *path = row + s->P;
        for (int head = 0; head < s->blocks->n_kv_head; head++) {
            int64_t at = unit / 2 * pass->layer_stride + unit % 2 * pass->value_stride
                + slot_of(pass, b) * pass->batch_stride + head * pass->head_stride;
            char *tree = (char *)pass->kv + at * bytes + (size_t)length_of(pass, b) * size;
            for (int i = 1; i < row[3 * s->P]; i++)
                if (path[i] != i)  // path[i] increases: no row is read after it is written
                    memcpy(tree + i * size, tree + path[i] * size, size);
        }
    }
}

void step_commit(Step *s) {
    const Pass *pass = &s->trees;
    int P = s->P, T = s->T, C = s->blocks->n_embd, bytes = pass->bfloat16 ? 2 : 4;
    int size = pass->B * s->blocks->n_kv_head * P * s->blocks->head_size;
    if (T > 1)
        parallel(move_path, s, 2 * (s->n_blocks - s->n_delta), size, pass->threads);
    commit_delta(pass, s->n_delta, s->accepted + P, s->accepted + 3 * P, 3 * P + 2);
    for (int b = 0; b < pass->B; b++) {
        const int64_t *row = s->accepted + b * (3 * P + 2);
        int slot = slot_of(pass, b), length = s->lengths[slot], count = row[3 * P];
        const char *hidden = pass->bfloat16 ? (char *)s->hidden : (char *)s->x;
        for (int i = 0; i < count; i++) {
            s->history[slot * s->history_stride + length + 1 + i] = row[i];
            if (s->hidden_rows)
                memcpy((char *)s->hidden_rows
                       + (slot * s->hidden_stride + (length + i) * C) * bytes,
                       hidden + (b * T + row[P + i]) * (size_t)C * bytes, C * bytes);
        }
        if (count)
            s->root[slot] = row[count - 1];
        s->lengths[slot] += count;
    }
}
