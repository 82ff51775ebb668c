/* What the CPU's kernels share: vectors that load any number of values, products of rows, the exponential.
 *
 * Rows of both operands of a product run along the inner dimension, so an output is a dot product: its terms are added lane by lane in
 * ascending order, then across lanes in one fixed order. So every output has the same bits whatever rows, tiles or threads surround it.
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

enum { FLOAT32, BFLOAT16, FP8, MXFP4, INT4 };

/* A stack of matrices [., N, D], or a single one, as int64 from outside. */
typedef struct {
    const void *codes, *scales; /* of the first one; plain kinds have no scales */
    long kind, height, width;   /* rows and columns that share a scale */
    long stride;                /* rows from one matrix of the stack to the next */
} matrix;

void matrix_product(const matrix *m, long expert, const float *const *x, long rows, long first, long end, long depth, float *const *y,
              long panel, float *scratch);

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
