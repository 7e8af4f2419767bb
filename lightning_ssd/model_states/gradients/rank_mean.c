/* The mean of several ranks' gradients in one pass over memory.

   The arithmetic is that of torch's `add_(values, alpha=share)` in fp32: the first rank's product is rounded, and each
   later one is fused with its sum where the processor does so; compile with -ffp-contract=off, or that is lost. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

/* A rank's gradient, whose kind is an index of `KINDS` in rank_mean.py. */
typedef struct {
    const void *values;
    int64_t kind;
} Source;

enum { FP32, BF16, FP16 };

enum {
    BLOCK = 1 << 10, /* elements that a thread sums at a time: they stay in its first cache between the ranks */
    ITEM = 1 << 16   /* elements that a thread takes at a time */
};

#define INLINE static inline __attribute__((always_inline))

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE float fp32_as_float(float value) { return value; }

INLINE float bf16_as_float(uint16_t value) { return as_float((uint32_t)value << 16); }

INLINE float fp16_as_float(uint16_t value) {
    const uint32_t magnitude = (uint32_t)(value & 0x7fffu) << 13, sign = (uint32_t)(value & 0x8000u) << 16;
    const uint32_t bias = (127u - 15u) << 23, least = 1u << 23, most = 31u << 23;
    /* Subnormal numbers, and zero: 2^-14 is added to their bits, and subtracted from their value. */
    float small = as_float((magnitude + bias + least)) - as_float(bias + least);
    uint32_t small_bits;
    memcpy(&small_bits, &small, 4);
    uint32_t bits = magnitude < least ? small_bits : magnitude >= most ? magnitude | 0xffu << 23 : magnitude + bias;
    return as_float(bits | sign);
}

INLINE float product_added(float value, float share, float sum) {
#if defined(FP_FAST_FMAF)
    return fmaf(value, share, sum);
#else
    return value * share + sum;
#endif
}

#define DEFINE(NAME, TYPE, LOAD)                                                                               \
    INLINE void NAME(const TYPE *values, int64_t count, float share, int first, float *sums) {                 \
        if (first)                                                                                             \
            for (int64_t i = 0; i < count; i++)                                                                \
                sums[i] = LOAD(values[i]) * share;                                                             \
        else                                                                                                   \
            for (int64_t i = 0; i < count; i++)                                                                \
                sums[i] = product_added(LOAD(values[i]), share, sums[i]);                                      \
    }

DEFINE(add_fp32, float, fp32_as_float)
DEFINE(add_bf16, uint16_t, bf16_as_float)
DEFINE(add_fp16, uint16_t, fp16_as_float)

/* Writes whole vectors past the caches: an ordinary store reads a line that it misses first. */
INLINE void put(float *to, const float *from, int64_t count, int past_caches) {
    int64_t done = 0;
#if defined(__AVX512F__)
    if (past_caches && (uintptr_t)to % 64 == 0)
        for (; done + 16 <= count; done += 16)
            _mm512_stream_ps(to + done, _mm512_load_ps(from + done));
#elif defined(__AVX__)
    if (past_caches && (uintptr_t)to % 32 == 0)
        for (; done + 8 <= count; done += 8)
            _mm256_stream_ps(to + done, _mm256_load_ps(from + done));
#endif
    memcpy(to + done, from + done, (count - done) * sizeof *to);
}

/* `total` may be the array of one of the sources: a block is read before it is written. */
void rank_mean(int64_t count, float *total, int64_t num_sources, const Source *sources, float share, int past_caches,
               int threads) {
    _Pragma("omp parallel for schedule(dynamic) if(count > ITEM) num_threads(threads)")
    for (int64_t item = 0; item < count; item += ITEM) {
        const int64_t end = count - item < ITEM ? count : item + ITEM;
        for (int64_t start = item; start < end; start += BLOCK) {
            const int64_t numel = end - start < BLOCK ? end - start : BLOCK;
            __attribute__((aligned(64))) float sums[BLOCK];
            for (int64_t rank = 0; rank < num_sources; rank++) {
                const Source source = sources[rank];
                if (source.kind == FP32)
                    add_fp32((const float *)source.values + start, numel, share, rank == 0, sums);
                else if (source.kind == BF16)
                    add_bf16((const uint16_t *)source.values + start, numel, share, rank == 0, sums);
                else
                    add_fp16((const uint16_t *)source.values + start, numel, share, rank == 0, sums);
            }
            put(total + start, sums, numel, past_caches);
        }
#if defined(__AVX__)
        _mm_sfence(); /* before the end of the loop, which other threads wait for */
#endif
    }
}
