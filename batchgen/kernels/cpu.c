/* What a decoder computes on a CPU: dense layers, experts, attention over paged KV, norms, the router.
 * In: float32 activations; weights and KV as stored, float32 or bfloat16. Out: float32. Never allocates, packs or copies a weight.
 *
 * Rows of both operands of a product run along the inner dimension, so an output is a dot product: its terms are added lane by lane in
 * ascending order, then across lanes in one fixed order. Attention takes a token's keys in blocks of one size from the first. So every
 * output has the same bits whatever rows, tiles or threads surround it.
 *
 * Sizes: T tokens, K experts per token, E experts, R = T * K rows of the expert batch, D inputs, N outputs, F expert width;
 * H KV heads, G query heads per KV head, S slots of a page, P pages of a row of the page table.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

#define TILE_ROWS 4    /* with TILE_OUTPUTS: accumulators that fit 16 registers beside their operands */
#define TILE_OUTPUTS 3
#define BLOCK_BYTES 24576   /* activations that stay in a first-level cache beside a panel of weights */
#define TASK_OUTPUTS 96     /* outputs of a task, a multiple of TILE_OUTPUTS: its weights stay in a second-level cache */
#define TASK_ROWS 256       /* rows of a task, at most */
#define BLOCK_KEYS 16       /* keys of a step of the running softmax, whatever the page size; a multiple of LANES */
#define SMALL 16384         /* values that one thread handles sooner than it wakes others ... */
#define FEW_PRODUCTS 1e5    /* ... and products: two microseconds of work */

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t narrow_vec __attribute__((vector_size(LANES * 2)));

/* Keeps a value in a register: compilers would rather load a weight once per row. */
#ifdef __x86_64__
#define PIN(v) __asm__("" : "+x"(v))
#else
#define PIN(v)
#endif

#define INLINE static inline __attribute__((always_inline))

/* The first `count` values, then zeros. */
INLINE vec load(const float *p, long count) {
    vec v = {0};
    if (count >= LANES)
        memcpy(&v, p, sizeof v);
    else
        memcpy(&v, p, count * sizeof *p);
    return v;
}

INLINE void store(float *p, vec v, long count) {
    if (count >= LANES)
        memcpy(p, &v, sizeof v);
    else
        memcpy(p, &v, count * sizeof *p);
}

/* a * b + c in one rounding: left to itself, a compiler may round twice in some tiles. */
INLINE vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vec load_weight(const void *weight, long at, long count, int is_bfloat16) {
    if (!is_bfloat16) return load((const float *)weight + at, count);
    narrow_vec narrow = {0};
    if (count >= LANES)
        memcpy(&narrow, (const uint16_t *)weight + at, sizeof narrow);
    else
        memcpy(&narrow, (const uint16_t *)weight + at, count * sizeof narrow[0]);
#if defined(__AVX512F__)
    return (vec)((uvec)_mm512_cvtepu16_epi32((__m256i)narrow) << 16);
#elif defined(__AVX2__)
    return (vec)((uvec)_mm256_cvtepu16_epi32((__m128i)narrow) << 16);
#else
    return (vec)(__builtin_convertvector(narrow, uvec) << 16);
#endif
}

typedef float quad __attribute__((vector_size(16)));

INLINE float sum(vec v) {
#if LANES == 16
    typedef float eight __attribute__((vector_size(32)));
    eight u = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    vec u = v;
#endif
    quad q = __builtin_shufflevector(u, u, 0, 1, 2, 3) + __builtin_shufflevector(u, u, 4, 5, 6, 7);
    q += __builtin_shufflevector(q, q, 2, 3, 0, 1);
    return q[0] + q[1];
}

INLINE void add_products(vec (*total)[TILE_OUTPUTS], const int rows, const int outputs, const float *const *x, const void *weight,
                         const int is_bfloat16, long first, long depth, long d, long count) {
    vec w[TILE_OUTPUTS];
    for (int n = 0; n < outputs; n++) {
        w[n] = load_weight(weight, (first + n) * depth + d, count, is_bfloat16);
        __builtin_prefetch((const char *)weight + ((first + n + TILE_OUTPUTS) * depth + d) * (is_bfloat16 ? 2 : 4));
        PIN(w[n]);
    }
    for (int r = 0; r < rows; r++) {
        vec v = load(x[r] + d, count);
        PIN(v);
        for (int n = 0; n < outputs; n++) total[r][n] = multiply_add(v, w[n], total[r][n]);
    }
}

/* Dot products of `rows` rows of x with `outputs` rows of the weight, both compile-time constants. */
INLINE void tile(const int rows, const int outputs, const float *const *x, const void *weight, const int is_bfloat16, long first,
                 long depth, float *const *y) {
    vec total[TILE_ROWS][TILE_OUTPUTS] = {0};
    long d = 0;
    for (; d + LANES <= depth; d += LANES) add_products(total, rows, outputs, x, weight, is_bfloat16, first, depth, d, LANES);
    if (d < depth) add_products(total, rows, outputs, x, weight, is_bfloat16, first, depth, d, depth - d);
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < outputs; n++) y[r][n] = sum(total[r][n]);
}

#define TILES(rows, outputs) case (rows) * 4 + (outputs): tile(rows, outputs, x, weight, is_bfloat16, first, depth, out); break;

INLINE void any_tile(int rows, int outputs, const float *const *x, const void *weight, int is_bfloat16, long first, long depth,
                     float *const *out) {
    switch (rows * 4 + outputs) {
        TILES(4, 3) TILES(4, 2) TILES(4, 1) TILES(3, 3) TILES(3, 2) TILES(3, 1)
        TILES(2, 3) TILES(2, 2) TILES(2, 1) TILES(1, 3) TILES(1, 2) TILES(1, 1)
    }
}

/* The first of `count` things that are cut into equal parts of at most `most`. */
INLINE long part(long count, long most) {
    long parts = (count + most - 1) / most;
    return (count + parts - 1) / parts;
}

/* y[r][n - first] = x[r] . weight[n] for the rows given and first <= n < end. */
INLINE void product(const float *const *x, long rows, const void *weight, int is_bfloat16, long first, long end, long depth,
                    float *const *y) {
    long block = BLOCK_BYTES / 4 / depth / TILE_ROWS * TILE_ROWS;
    if (block < TILE_ROWS) block = TILE_ROWS;
    for (long top = 0, bottom; top < rows; top = bottom) {
        bottom = top + part(rows - top, block);
        for (long n = first; n < end; n += TILE_OUTPUTS) {
            int outputs = end - n < TILE_OUTPUTS ? (int)(end - n) : TILE_OUTPUTS;
            for (long r = top; r < bottom;) {
                int count = (int)part(bottom - r, TILE_ROWS);
                float *out[TILE_ROWS];
                for (int i = 0; i < count; i++) out[i] = y[r + i] + (n - first);
                any_tile(count, outputs, x + r, weight, is_bfloat16, n, depth, out);
                r += count;
            }
        }
    }
}

static __attribute__((noinline)) void product_float32(const float *const *x, long rows, const void *weight, long first, long end, long depth, float *const *y) {
    product(x, rows, weight, 0, first, end, depth, y);
}

static __attribute__((noinline)) void product_bfloat16(const float *const *x, long rows, const void *weight, long first, long end, long depth, float *const *y) {
    product(x, rows, weight, 1, first, end, depth, y);
}

typedef void (*product_function)(const float *const *, long, const void *, long, long, long, float *const *);

/* y_TN = x_TD @ weight_ND^T, rows of x `stride` apart. */
void linear(const float *x, long stride, const void *weight, long is_bfloat16, float *y, long T, long N, long D, long threads) {
    product_function multiply = is_bfloat16 ? product_bfloat16 : product_float32;
    long across = (N + TASK_OUTPUTS - 1) / TASK_OUTPUTS, down = (T + TASK_ROWS - 1) / TASK_ROWS;
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) if ((double)T * N * D > FEW_PRODUCTS)
    for (long task = 0; task < across * down; task++) {
        long top = task / across * TASK_ROWS, first = task % across * TASK_OUTPUTS;
        long rows = T - top < TASK_ROWS ? T - top : TASK_ROWS, end = N - first < TASK_OUTPUTS ? N : first + TASK_OUTPUTS;
        const float *in[TASK_ROWS];
        float *out[TASK_ROWS];
        for (long r = 0; r < rows; r++) in[r] = x + (top + r) * stride, out[r] = y + (top + r) * N + first;
        multiply(in, rows, weight, first, end, D, out);
    }
}

/* e^v, relative error below 2e-7 (Cephes' reduction and polynomial); v is clamped to +-87, NaN stays NaN. */
INLINE vec exponential(vec v) {
    const vec zero = {0};
    const vec most = zero + 87.0f, least = zero - 87.0f;
    const vec shift = zero + 12582912.0f; /* adding it rounds to an integer in the low bits */
    ivec above = v > most, below = v < least;
    v = (vec)((above & (ivec)most) | (below & (ivec)least) | (~(above | below) & (ivec)v));
    const vec nan = v - v;
    vec shifted = v * 1.44269504f + shift;
    vec n = shifted - shift;
    vec r = v - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vec)((ivec)p + ((ivec)shifted << 23)) + nan;
}

/* gate := silu(gate) * up over F values. */
static void gate_values(float *gate, const float *up, long F) {
    for (long f = 0; f < F; f += LANES) {
        vec g = load(gate + f, F - f);
        store(gate + f, g / (exponential(-g) + 1.0f) * load(up + f, F - f), F - f);
    }
}

/* A layer of experts: out_TD = sum over k of weights_TK * down(silu(gate(x)) * up(x)) of expert ids_TK.
 * Work space: order_R and start_E (E + 1) of int64, hidden_RF and y_RD of float32. */
void experts(const float *x, const void *gate_up, const void *down, long is_bfloat16, const int64_t *ids, const float *weights, float *out,
             long T, long K, long E, long D, long F, int64_t *order, int64_t *start, float *hidden, float *y, long threads) {
    product_function multiply = is_bfloat16 ? product_bfloat16 : product_float32;
    long size = is_bfloat16 ? 2 : 4;
    memset(start, 0, (E + 1) * sizeof *start);
    for (long r = 0; r < T * K; r++) start[ids[r] + 1]++;
    for (long e = 0; e < E; e++) start[e + 1] += start[e];
    for (long r = 0; r < T * K; r++) order[start[ids[r]]++] = r;
    for (long e = E; e > 0; e--) start[e] = start[e - 1];
    start[0] = 0;
    long wide = (F + TASK_OUTPUTS - 1) / TASK_OUTPUTS, deep = (D + TASK_OUTPUTS - 1) / TASK_OUTPUTS;
#pragma omp parallel num_threads((int)threads) if (3.0 * T * K * D * F > FEW_PRODUCTS)
    {
#pragma omp for schedule(dynamic)
        for (long task = 0; task < E * wide; task++) {
            long e = task / wide, first = task % wide * TASK_OUTPUTS, end = F - first < TASK_OUTPUTS ? F : first + TASK_OUTPUTS;
            const char *matrix = (const char *)gate_up + e * 2 * F * D * size;
            for (long top = start[e]; top < start[e + 1]; top += TASK_ROWS) {
                long rows = start[e + 1] - top < TASK_ROWS ? start[e + 1] - top : TASK_ROWS;
                const float *in[TASK_ROWS];
                float *gate_rows[TASK_ROWS], *up_rows[TASK_ROWS], up[TASK_ROWS * TASK_OUTPUTS];
                for (long r = 0; r < rows; r++) {
                    in[r] = x + order[top + r] / K * D;
                    gate_rows[r] = hidden + (top + r) * F + first;
                    up_rows[r] = up + r * TASK_OUTPUTS;
                }
                multiply(in, rows, matrix, first, end, D, gate_rows);
                multiply(in, rows, matrix, F + first, F + end, D, up_rows);
                for (long r = 0; r < rows; r++) gate_values(gate_rows[r], up_rows[r], end - first);
            }
        }
#pragma omp for schedule(dynamic)
        for (long task = 0; task < E * deep; task++) {
            long e = task / deep, first = task % deep * TASK_OUTPUTS, end = D - first < TASK_OUTPUTS ? D : first + TASK_OUTPUTS;
            const char *matrix = (const char *)down + e * D * F * size;
            for (long top = start[e]; top < start[e + 1]; top += TASK_ROWS) {
                long rows = start[e + 1] - top < TASK_ROWS ? start[e + 1] - top : TASK_ROWS;
                const float *in[TASK_ROWS];
                float *rows_out[TASK_ROWS];
                for (long r = 0; r < rows; r++) in[r] = hidden + (top + r) * F, rows_out[r] = y + order[top + r] * D + first;
                multiply(in, rows, matrix, first, end, F, rows_out);
            }
        }
#pragma omp for
        for (long t = 0; t < T; t++)
            for (long d = 0; d < D; d++) {
                float total = 0;
                for (long k = 0; k < K; k++) total += weights[t * K + k] * y[(t * K + k) * D + d];
                out[t * D + d] = total;
            }
    }
}

/* out = x / rms(x) * weight over the last D of rows [T, heads, D]; tokens of x are `stride` apart. */
void rms_norm(const float *x, long stride, const void *weight, long is_bfloat16, double eps, float *out, long T, long heads, long D,
              long threads) {
#pragma omp parallel for num_threads((int)threads) if (T * heads * D > SMALL)
    for (long row = 0; row < T * heads; row++) {
        const float *in = x + row / heads * stride + row % heads * D;
        vec squares = {0};
        for (long d = 0; d < D; d += LANES) {
            vec v = load(in + d, D - d);
            squares += v * v;
        }
        float scale = 1.0f / sqrtf(sum(squares) / (float)D + (float)eps);
        for (long d = 0; d < D; d += LANES) {
            vec v = load_weight(weight, d, D - d, (int)is_bfloat16) * (load(in + d, D - d) * scale);
            store(out + row * D + d, v, D - d);
        }
    }
}

/* out: pairs (i, i + D/2) of each head of x [T, heads, D] rotated by its token's angle; table [T, 2, D]: cosines, then sines of which the
 * first half is negated. */
void rotate(const float *x, long stride, const float *table, float *out, long T, long heads, long D, long threads) {
#pragma omp parallel for num_threads((int)threads) if (T * heads * D > SMALL)
    for (long row = 0; row < T * heads; row++) {
        const float *in = x + row / heads * stride + row % heads * D, *cosine = table + row / heads * 2 * D, *sine = cosine + D;
        for (long d = 0; d < D; d++) out[row * D + d] = in[d] * cosine[d] + in[d < D / 2 ? d + D / 2 : d - D / 2] * sine[d];
    }
}

/* The K likeliest experts of each token, likeliest first, equals by number, and their probabilities among all E, scaled to sum to 1 on
 * request. `work` is [T, E]; NaN logits give NaN weights. */
void route(const float *logits, long T, long E, long K, long normalise, int64_t *ids, float *weights, float *work, long threads) {
#pragma omp parallel for num_threads((int)threads) if (T * E > SMALL)
    for (long t = 0; t < T; t++) {
        float *p = work + t * E, most = logits[t * E], total = 0, chosen = 0;
        for (long e = 1; e < E; e++) most = logits[t * E + e] > most ? logits[t * E + e] : most;
        for (long e = 0; e < E; e += LANES) store(p + e, exponential(load(logits + t * E + e, E - e) - most), E - e);
        for (long e = 0; e < E; e++) total += p[e];
        for (long k = 0; k < K; k++) {
            long best = 0;
            for (long e = 1; e < E; e++) best = p[e] > p[best] ? e : best;
            ids[t * K + k] = best;
            weights[t * K + k] = p[best] / total;
            chosen += weights[t * K + k];
            p[best] = -1;
        }
        for (long k = 0; normalise && k < K; k++) weights[t * K + k] /= chosen;
    }
}

INLINE float largest(vec v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

typedef struct {
    const char *keys, *values; /* one layer's [pages, H, S, D] */
    const int64_t *pages;      /* of one row of the page table */
    long H, S, D, size, head;
} cache;

INLINE long cache_offset(const cache *kv, long position) {
    return ((kv->pages[position / kv->S] * kv->H + kv->head) * kv->S + position % kv->S) * kv->D * kv->size;
}

/* Keys first to first + count, added to a running softmax of `rows` query heads, a compile-time constant.
 * most, total: largest score and sum of exponentials so far; out: sum of exponentials times values so far. */
INLINE void attend_keys(const int rows, int is_bfloat16, const float *const *q, const cache *kv, long first, long count, float *most,
                        float *total, float *const *out) {
    float scores[TILE_ROWS][BLOCK_KEYS], *at[TILE_ROWS], shrink[TILE_ROWS];
    const char *values[BLOCK_KEYS];
    for (long c = 0, piece; c < count; c += piece) {
        piece = kv->S - (first + c) % kv->S < count - c ? kv->S - (first + c) % kv->S : count - c;
        long offset = cache_offset(kv, first + c);
        for (int r = 0; r < rows; r++) at[r] = scores[r] + c;
        (is_bfloat16 ? product_bfloat16 : product_float32)(q, rows, kv->keys + offset, 0, piece, kv->D, at);
        for (long i = 0; i < piece; i++) values[c + i] = kv->values + offset + i * kv->D * kv->size;
    }
    for (int r = 0; r < rows; r++) {
        vec high = (vec){0} + most[r], sums = {0};
        for (long c = count; c % LANES; c++) scores[r][c] = -INFINITY;
        for (long c = 0; c < count; c += LANES) {
            vec score = load(scores[r] + c, LANES);
            ivec above = score > high;
            high = (vec)((above & (ivec)score) | (~above & (ivec)high));
        }
        float highest = largest(high);
        for (long c = 0; c < count; c += LANES) {
            vec p = exponential(load(scores[r] + c, LANES) - highest);
            store(scores[r] + c, p, LANES);
            sums += p;
        }
        shrink[r] = exponential((vec){0} + most[r] - highest)[0];
        total[r] = total[r] * shrink[r] + sum(sums);
        most[r] = highest;
    }
    for (long d = 0; d < kv->D; d += LANES) {
        vec add[TILE_ROWS] = {0};
        for (long c = 0; c < count; c++) {
            vec value = load_weight(values[c], d, kv->D - d, is_bfloat16);
            PIN(value);
            for (int r = 0; r < rows; r++) add[r] += value * scores[r][c];
        }
        for (int r = 0; r < rows; r++) store(out[r] + d, load(out[r] + d, kv->D - d) * shrink[r] + add[r], kv->D - d);
    }
}

#define KEYS(rows) case rows: attend_keys(rows, (int)is_bfloat16, q, &kv, first, count, most, total, sums); break;

/* Causal attention of each token over its own row's keys: out_THGD. row_T: row of the page table [B, P]. */
void attention(const float *q_THGD, const void *k, const void *v, long is_bfloat16, const int64_t *table, long P, const int64_t *row,
               const int64_t *position, double scale, float *out, long T, long H, long G, long S, long D, long threads) {
    long slices = (G + TILE_ROWS - 1) / TILE_ROWS;
    double num_keys = 0;
    for (long t = 0; t < T; t++) num_keys += position[t] + 1;
#pragma omp parallel for schedule(dynamic, 4) num_threads((int)threads) if (2.0 * num_keys * H * G * D > FEW_PRODUCTS)
    for (long task = 0; task < T * H * slices; task++) {
        long t = task / (H * slices), h = task / slices % H, g = task % slices * TILE_ROWS;
        int rows = G - g < TILE_ROWS ? (int)(G - g) : TILE_ROWS;
        cache kv = {k, v, table + row[t] * P, H, S, D, is_bfloat16 ? 2 : 4, h};
        float most[TILE_ROWS], total[TILE_ROWS] = {0}, scaled[TILE_ROWS * D], *sums[TILE_ROWS];
        const float *q[TILE_ROWS];
        for (int r = 0; r < rows; r++) {
            long head = (t * H + h) * G + g + r;
            for (long d = 0; d < D; d++) scaled[r * D + d] = q_THGD[head * D + d] * (float)scale;
            most[r] = -INFINITY, q[r] = scaled + r * D, sums[r] = out + head * D;
            memset(sums[r], 0, D * sizeof **sums);
        }
        for (long first = 0; first <= position[t]; first += BLOCK_KEYS) {
            long count = position[t] + 1 - first < BLOCK_KEYS ? position[t] + 1 - first : BLOCK_KEYS;
            for (long next = first + BLOCK_KEYS; next <= position[t] && next < first + 2 * BLOCK_KEYS; next++) {
                long offset = cache_offset(&kv, next);
                for (long at = 0; at < D * kv.size; at += 64) {
                    __builtin_prefetch(kv.keys + offset + at);
                    __builtin_prefetch(kv.values + offset + at);
                }
            }
            switch (rows) { KEYS(4) KEYS(3) KEYS(2) KEYS(1) }
        }
        for (int r = 0; r < rows; r++)
            for (long d = 0; d < D; d++) sums[r][d] /= total[r];
    }
}
