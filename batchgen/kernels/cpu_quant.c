/* Products with packed weights: a panel of a matrix is decoded into a scratch that stays in a second-level cache, and multiplied there;
 * a tile of rows or fewer is multiplied while decoding, in registers.
 * In: float32 activations; codes and scales as checkpoints ship them. Out: float32, the same bits as if the whole matrix were decoded.
 *
 * Sizes: T tokens, N outputs, D inputs.
 */

#include <omp.h>

#include "cpu.h"

/* LANES values of e4m3 divided by 256, or the first `count`, then zeros: as bits they are halves of another bias, and halves convert without
 * a detour for subnormals. */
INLINE vec load_e4m3(const uint8_t *p, long count) {
    uint8_t codes[LANES] = {0};
    if (count < LANES) p = memcpy(codes, p, count);
#if defined(__AVX512BW__)
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    return (vec)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xBF80)));
#elif defined(__F16C__) && LANES == 8
    __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
    return (vec)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xBF80)));
#else
    uvec code;
    for (int i = 0; i < LANES; i++) code[i] = p[i];
    uvec magnitude = (code & 0x7F) << 20; /* as a float: 2^-120 of the value */
    return (vec)((uvec)((vec)magnitude * 0x1p112f) | (code & 0x80) << 24);
#endif
}

/* LANES codes of 4 bits, each in the low bits of its lane; what is above is another code's. */
INLINE uvec load_nibbles(const uint8_t *p) {
    uint32_t word[LANES / 8];
    memcpy(word, p, sizeof word);
#if LANES == 16
    const uvec shift = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    const uint32_t a = word[0], b = word[1];
    return (uvec){a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b} >> shift;
#else
    const uvec shift = {0, 4, 8, 12, 16, 20, 24, 28};
    return ((uvec){0} + word[0]) >> shift;
#endif
}

INLINE vec from_e2m1(uvec code) {
#if defined(__AVX512F__)
    const vec values = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return (vec)_mm512_permutexvar_ps((__m512i)code, (__m512)values);
#else
    const vec magnitudes = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
#if defined(__AVX2__)
    uvec magnitude = (uvec)_mm256_permutevar8x32_ps((__m256)magnitudes, (__m256i)code);
#else
    uvec magnitude;
    for (int i = 0; i < LANES; i++) magnitude[i] = ((uvec)magnitudes)[code[i] & 7];
#endif
    return (vec)(magnitude | (code << 28 & 0x80000000u));
#endif
}

INLINE vec from_int4(uvec code) { return __builtin_convertvector((ivec)(code & 15) - 8, vec); }

INLINE float from_e8m0(uint8_t scale) {
    uint32_t bits = scale ? (uint32_t)scale << 23 : 1u << 22;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float from_bfloat16(uint16_t scale) {
    uint32_t bits = (uint32_t)scale << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* LANES values without their scale. */
INLINE vec load_codes(const int kind, const uint8_t *codes, long d, long count) {
    if (kind == FP8) return load_e4m3(codes + d, count);
    uvec code = load_nibbles(codes + d / 2); /* rows of these hold whole vectors */
    return kind == MXFP4 ? from_e2m1(code) : from_int4(code);
}

INLINE float load_scale(const int kind, const void *scales, long block) {
    if (kind == FP8) return ((const float *)scales)[block] * 256.0f;
    return kind == MXFP4 ? from_e8m0(((const uint8_t *)scales)[block]) : from_bfloat16(((const uint16_t *)scales)[block]);
}

/* One row of D values; its codes and scales. `width` values share a scale. */
INLINE void decode_row(const int kind, const uint8_t *codes, const void *scales, long width, long D, float *out) {
    for (long first = 0, block = 0; first < D; first += width, block++) {
        long end = first + width < D ? first + width : D, d = first;
        float scale = load_scale(kind, scales, block);
        for (; d + LANES <= end; d += LANES) store(out + d, load_codes(kind, codes, d, LANES) * scale, LANES);
        if (d < end) store(out + d, load_codes(kind, codes, d, end - d) * scale, end - d);
    }
}

/* Where the rows of one matrix of a stack lie. */
typedef struct {
    const uint8_t *codes;
    const char *scales;
    long row_bytes, scale_bytes;
} place;

INLINE place locate(const int kind, const matrix *m, long expert, long D) {
    long across = (D + m->width - 1) / m->width, down = (m->stride + m->height - 1) / m->height;
    place at = {.row_bytes = kind == FP8 ? D : D / 2, .scale_bytes = across * (kind == FP8 ? 4 : kind == MXFP4 ? 1 : 2)};
    at.codes = (const uint8_t *)m->codes + expert * m->stride * at.row_bytes;
    at.scales = (const char *)m->scales + expert * down * at.scale_bytes;
    return at;
}

INLINE void decode(const int kind, const matrix *m, long expert, long first, long end, long D, float *out) {
    place at = locate(kind, m, expert, D);
    for (long n = first; n < end; n++)
        decode_row(kind, at.codes + n * at.row_bytes, at.scales + n / m->height * at.scale_bytes, m->width, D, out + (n - first) * D);
}

/* As `tile`, decoding in registers: for few rows, where a scratch would be read as often as written. */
INLINE void packed_tile(const int kind, const int rows, const int outputs, const float *const *x, const matrix *m, place at, long first,
                        long D, float *const *y) {
    vec total[TILE_ROWS][TILE_OUTPUTS] = {0};
    const uint8_t *codes[TILE_OUTPUTS];
    const char *scales[TILE_OUTPUTS];
    for (int n = 0; n < outputs; n++) {
        codes[n] = at.codes + (first + n) * at.row_bytes;
        scales[n] = at.scales + (first + n) / m->height * at.scale_bytes;
    }
    for (long begin = 0, block = 0; begin < D; begin += m->width, block++) {
        long end = begin + m->width < D ? begin + m->width : D;
        float scale[TILE_OUTPUTS];
        for (int n = 0; n < outputs; n++) {
            scale[n] = load_scale(kind, scales[n], block);
            __builtin_prefetch(codes[n] + outputs * at.row_bytes + (kind == FP8 ? begin : begin / 2));
        }
        for (long d = begin; d < end; d += LANES) {
            long count = end - d;
            vec w[TILE_OUTPUTS];
            for (int n = 0; n < outputs; n++) w[n] = load_codes(kind, codes[n], d, count) * scale[n];
            for (int r = 0; r < rows; r++) {
                vec v = load(x[r] + d, count);
                for (int n = 0; n < outputs; n++) total[r][n] = multiply_add(v, w[n], total[r][n]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < outputs; n++) y[r][n] = sum(total[r][n]);
}

#define PACKED_TILE(rows, outputs) case rows: packed_tile(kind, rows, outputs, x, m, at, n, D, out); break;

/* As `product`, of at most TILE_ROWS rows. */
INLINE void few_rows(const int kind, const float *const *x, long rows, const matrix *m, long expert, long first, long end, long D,
                     float *const *y) {
    place at = locate(kind, m, expert, D);
    for (long n = first; n < end;) {
        float *out[TILE_ROWS];
        for (long r = 0; r < rows; r++) out[r] = y[r] + (n - first);
        if (n + TILE_OUTPUTS <= end) {
            switch (rows) { PACKED_TILE(1, TILE_OUTPUTS) PACKED_TILE(2, TILE_OUTPUTS) PACKED_TILE(3, TILE_OUTPUTS) PACKED_TILE(4, TILE_OUTPUTS) }
            n += TILE_OUTPUTS;
        } else {
            switch (rows) { PACKED_TILE(1, 1) PACKED_TILE(2, 1) PACKED_TILE(3, 1) PACKED_TILE(4, 1) }
            n++;
        }
    }
}

typedef void (*decode_function)(const matrix *, long, long, long, long, float *);
typedef void (*few_rows_function)(const float *const *, long, const matrix *, long, long, long, long, float *const *);

#define OF_KIND(name, kind)                                                                                                              \
    static __attribute__((noinline)) void decode_##name(const matrix *m, long expert, long first, long end, long D, float *out) {        \
        decode(kind, m, expert, first, end, D, out);                                                                                     \
    }                                                                                                                                    \
    static __attribute__((noinline)) void few_rows_##name(const float *const *x, long rows, const matrix *m, long expert, long first,    \
                                                          long end, long D, float *const *y) {                                           \
        few_rows(kind, x, rows, m, expert, first, end, D, y);                                                                            \
    }
OF_KIND(fp8, FP8)
OF_KIND(mxfp4, MXFP4)
OF_KIND(int4, INT4)

/* As `product`, of one matrix of a stack whatever its kind. `scratch` holds `panel` rows; both are for packed kinds alone. */
void matrix_product(const matrix *m, long expert, const float *const *x, long rows, long first, long end, long depth, float *const *y,
              long panel, float *scratch) {
    if (m->kind == FLOAT32) {
        product_float32(x, rows, (const float *)m->codes + expert * m->stride * depth, first, end, depth, y);
    } else if (m->kind == BFLOAT16) {
        product_bfloat16(x, rows, (const uint16_t *)m->codes + expert * m->stride * depth, first, end, depth, y);
    } else if (rows <= TILE_ROWS && m->width % LANES == 0) {
        few_rows_function multiply = m->kind == FP8 ? few_rows_fp8 : m->kind == MXFP4 ? few_rows_mxfp4 : few_rows_int4;
        multiply(x, rows, m, expert, first, end, depth, y);
    } else {
        decode_function unpack = m->kind == FP8 ? decode_fp8 : m->kind == MXFP4 ? decode_mxfp4 : decode_int4;
        for (long top = first; top < end; top += panel) {
            long bottom = end - top < panel ? end : top + panel;
            unpack(m, expert, top, bottom, depth, scratch);
            float *part[TASK_ROWS];
            for (long r = 0; r < rows; r++) part[r] = y[r] + (top - first);
            product_float32(x, rows, scratch, 0, bottom - top, depth, part);
        }
    }
}

/* y_TN = x_TD @ W_ND^T, rows of x and y `stride` apart; `scratch` [threads, panel, D]. */
void packed_linear(const float *x, long x_stride, const matrix *weight, float *y, long y_stride, long T, long N, long D, long panel,
                   float *scratch, long threads) {
    long outputs = panel < TASK_OUTPUTS ? TASK_OUTPUTS / panel * panel : panel;
    long across = (N + outputs - 1) / outputs, down = (T + TASK_ROWS - 1) / TASK_ROWS;
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) if ((double)(T + 1) * N * D > FEW_PRODUCTS)
    for (long task = 0; task < across * down; task++) {
        long top = task / across * TASK_ROWS, first = task % across * outputs;
        long rows = T - top < TASK_ROWS ? T - top : TASK_ROWS, end = N - first < outputs ? N : first + outputs;
        const float *in[TASK_ROWS];
        float *out[TASK_ROWS];
        for (long r = 0; r < rows; r++) in[r] = x + (top + r) * x_stride, out[r] = y + (top + r) * y_stride + first;
        matrix_product(weight, 0, in, rows, first, end, D, out, panel, scratch + omp_get_thread_num() * panel * D);
    }
}
