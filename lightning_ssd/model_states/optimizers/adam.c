/* One pass of Adam or AdamW over a flat parameter: gradient in, states, master weights and compute weights out.

   The arithmetic is torch's on a CPU, operation by operation, so that both give the same bits; compile with
   -ffp-contract=off, or that is lost. torch has two kinds of roundings:

   - the for-loop and foreach implementations (torch/optim/adam.py) compute square roots with MKL, whose results are not
     always the nearest number: `Settings.root` is that function;
   - the fused kernel (aten/src/ATen/native/cpu/FusedAdamKernel.cpp) rounds to the nearest number, and the elements of a
     parameter that fill no whole vector are stepped by a scalar loop, in which the compiler has fused another product
     and sum into one operation: `tailed` below.

   Each element is read and written once: 26 bytes of memory traffic with split master weights, 28 with whole ones,
   where conversions around a kernel of their own would take 40. Ordinary stores to a second version add 12 to 14 bytes,
   since a store that misses the caches reads the line first.

   Moments in bf16 take 8 bytes of traffic less, and those in 8 bits 12. They are computed in fp32, one block at a time,
   and rounded when they are stored, so that a step's weights are those of the moments before rounding.

   With several ranks, a step reads all ranks' gradients, and computes their mean as it needs it: see `Source`. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

typedef struct { /* as in dynamic_code.py */
    float slopes[16], offsets[16], rises[8], starts[8], numbers[256];
} DynamicCode;

/* A rank's gradient, whose kind is an index of `KINDS` in rank_mean.py. */
typedef struct {
    const void *values;
    int64_t kind;
} Source;

enum { FP32, BF16, FP16 };

typedef struct {
    float scale;           /* of the gradient in fp32; negative to maximize */
    float decay;           /* decoupled: factor of the weights; else their factor when they are added to the gradient */
    float lerp;            /* 1 - beta1, below 0.5 */
    float beta2;
    float one_minus_beta2;
    float correction;      /* sqrt(1 - beta2^step) */
    float reciprocal;      /* 1 / correction */
    float eps;
    float step_size;       /* -lr / (1 - beta1^step) */
    int32_t decoupled;
    int32_t threads;
    int32_t past_caches;   /* whether new values that replace no old ones are written past the caches */
    int32_t parts;         /* arrays whose new values are stored, see below */
    int32_t moments;       /* format of the moments, see below */
    int64_t step;          /* steps of the parameters after this one */
    void (*root)(int count, const float *of, float *into, long long mode); /* MKL's vmsSqrt; NULL: sqrtf */
    const float *scales_in[2];      /* of both moments in 8 bits, one for each block, and new ones */
    float *scales[2];
    const DynamicCode *codes[2];    /* of both moments */
    const Source *sources;          /* of the ranks whose mean is the gradient; NULL: it is an array of its own */
    int64_t num_sources;
    float share;                    /* reciprocal of the number of ranks */
} Settings;

enum { WEIGHTS = 1, MASTERS = 2, MOMENTS = 4, ALL = 7 };

enum { MOMENTS_FP32, MOMENTS_BF16, MOMENTS_8BIT };

/* A part of one parameter that one thread steps: the elements from `tail` on fill no whole vector of torch's. */
typedef struct {
    int64_t start, tail, end;
    int64_t first;         /* number of the element at `start` in the parameter */
    int64_t random_key;    /* key of the random numbers that round moments of the parameter */
} Item;

#define INLINE static inline __attribute__((always_inline))
#define ONCE static __attribute__((noinline)) /* compiled once: copies in each function would take seconds to compile */

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float bf16_as_float(uint16_t value) { return as_float((uint32_t)value << 16); }

/* To nearest, ties to even; a NaN remains one. */
INLINE uint16_t as_bf16(float value) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* Random numbers and roundings as in rounding.py. */
INLINE uint64_t step_keys(uint64_t random_key, uint64_t step) {
    uint64_t mixed = random_key + step * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
    return mixed ^ mixed >> 31;
}

INLINE uint32_t random_bits(uint32_t element, uint32_t low_key, uint32_t high_key) {
    uint32_t bits = element + low_key;
    bits = (bits ^ bits >> 16) * 0x7FEB352Du;
    bits = ((bits ^ bits >> 15) + high_key) * 0x846CA68Bu;
    return bits ^ bits >> 16;
}

INLINE uint16_t round_stochastically(float value, uint32_t random) {
    uint32_t bits = as_bits(value);
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + random) >> 16);
}

/* As in split.py. */
INLINE float join(uint16_t weight, int16_t low) {
    return as_float(((uint32_t)weight << 16) + (uint32_t)(int32_t)low);
}

INLINE uint32_t splittable(float value) {
    uint32_t bits = as_bits(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
}

INLINE float first_moment(float m, float g, const Settings *s) { return fmaf(s->lerp, g - m, m); }

INLINE float second_moment(float v, float g, const Settings *s) {
    return fmaf(s->one_minus_beta2 * g, g, v * s->beta2);
}

INLINE float second_moment_in_tail(float v, float g, const Settings *s) {
    return fmaf(v, s->beta2, s->one_minus_beta2 * g * g);
}

INLINE float scaled_gradient(float g, float p, const Settings *s, int decoupled) {
    g = g * s->scale;
    return decoupled ? g : fmaf(p, s->decay, g);
}

/* Returns the new master weight. With rounded moments, whose steps have no bits of torch's to reproduce, a product and a
   sum replace a division: on most processors divisions and roots would take more time than the memory. */
INLINE float stepped(float p, float m, float root, const Settings *s, int decoupled, int rounded) {
    if (decoupled)
        p = p * s->decay;
    float divisor = rounded ? fmaf(root, s->reciprocal, s->eps) : root / s->correction + s->eps;
    return p + s->step_size * m / divisor;
}

enum { BLOCK = 1 << 10 };               /* elements of one call of `root`, which fit into the first cache */
static const long long MKL_MODE = 0x140102; /* torch's: VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE */

/* Copies new values to memory. Past the caches it reads no line of `to`, as ordinary stores do. */
INLINE void put(void *to, const void *from, int64_t nbytes, int past_caches) {
    int64_t done = 0;
#if defined(__AVX512F__)
    if (past_caches && (uintptr_t)to % 64 == 0)
        for (; done + 64 <= nbytes; done += 64)
            _mm512_stream_si512((__m512i *)((char *)to + done), _mm512_loadu_si512((const char *)from + done));
#elif defined(__AVX__)
    if (past_caches && (uintptr_t)to % 32 == 0)
        for (; done + 32 <= nbytes; done += 32)
            _mm256_stream_si256((__m256i *)((char *)to + done),
                                _mm256_loadu_si256((const __m256i *)((const char *)from + done)));
#endif
    memcpy((char *)to + done, (const char *)from + done, nbytes - done);
}

/* Orders stores past the caches before all later ones of this thread. */
INLINE void fence(void) {
#if defined(__AVX__)
    _mm_sfence();
#endif
}

enum { CODE_BLOCK = 256, DECADES = 7 }; /* as in dynamic_code.py */

INLINE int64_t block_end(int64_t start, int64_t count) {
    return count - start < CODE_BLOCK ? count : start + CODE_BLOCK;
}

INLINE void decode(const uint8_t *codes, const float *scales, const DynamicCode *code, int64_t count, int is_signed,
                   float *values) {
    for (int64_t start = 0; start < count; start += CODE_BLOCK) {
        const float scale = scales[start / CODE_BLOCK];
        const int64_t end = block_end(start, count);
        int64_t i = start;
#if defined(__AVX512F__)
        /* The same numbers are computed from their positions: reading 16 entries of a table takes longer. */
        const __m512 slopes = _mm512_loadu_ps(code->slopes), offsets = _mm512_loadu_ps(code->offsets);
        const __m512i first = _mm512_set1_epi32(is_signed ? 127 : -1), sign = _mm512_set1_epi32(INT32_MIN);
        for (; i + 16 <= end; i += 16) {
            __m512i number = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
            __m512i place = _mm512_sub_epi32(number, first);
            __m512 position = _mm512_cvtepi32_ps(place);
            __m512i bits = _mm512_castps_si512(position), exponent = _mm512_srli_epi32(bits, 23);
            __m512 offset = _mm512_permutexvar_ps(exponent, offsets), slope = _mm512_permutexvar_ps(exponent, slopes);
            if (is_signed) {
                /* offset ^ (bits & sign); and 0 for the position 0, whose exponent is that of another decade */
                __m512i turned = _mm512_ternarylogic_epi32(_mm512_castps_si512(offset), bits, sign, 0x78);
                offset = _mm512_castsi512_ps(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(place, place), turned));
            }
            __m512 value = _mm512_mul_ps(_mm512_fmadd_ps(position, slope, offset), _mm512_set1_ps(scale));
            _mm512_storeu_ps(values + i, value);
        }
#endif
        _Pragma("GCC ivdep")
        for (; i < end; i++)
            values[i] = code->numbers[codes[i]] * scale;
    }
}

/* Returns the reciprocal of a block's scale, or 0 for a block without codes, and stores the scale. */
INLINE float scale_of(const float *values, int64_t count, int is_signed, float *scale) {
    int32_t largest = 0, largest_positive = 0; /* bits of fp32 numbers, which are ordered as the numbers are */
    for (int64_t i = 0; i < count; i++) {
        int32_t bits = (int32_t)as_bits(values[i]), magnitude = bits & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
        if (is_signed)
            largest_positive = bits > largest_positive ? bits : largest_positive;
    }
    *scale = as_float((uint32_t)largest);
    if (largest >= 0x7f800000)
        *scale = as_float(0x7fc00000u);
    else if (largest < 0x00800000)
        *scale = 0.0f;
    else if (is_signed && largest_positive != largest)
        *scale = -*scale;
    return largest >= 0x7f800000 || largest < 0x00800000 ? 0.0f : 1.0f / *scale;
}

/* Encodes at most `BLOCK` values. All scales are computed first: a block's codes would have to wait for its own. */
INLINE void encode(const float *values, int64_t count, const DynamicCode *code, int is_signed, uint8_t *codes,
                   float *scales) {
    const float *rises = code->rises, *starts = code->starts;
    float inverses[BLOCK / CODE_BLOCK];
    for (int64_t start = 0; start < count; start += CODE_BLOCK)
        inverses[start / CODE_BLOCK] =
            scale_of(values + start, block_end(start, count) - start, is_signed, scales + start / CODE_BLOCK);
    for (int64_t start = 0; start < count; start += CODE_BLOCK) {
        const int64_t end = block_end(start, count);
        const float inverse = inverses[start / CODE_BLOCK];
        if (inverse == 0.0f) {
            memset(codes + start, is_signed ? 127 : 0, end - start);
            continue;
        }
        _Pragma("GCC ivdep")
        for (int64_t i = start; i < end; i++) {
            float relative = values[i] * inverse, magnitude = is_signed ? fabsf(relative) : relative;
            float position = fmaf(magnitude, rises[0], starts[0]);
            for (int decade = 1; decade < DECADES; decade++) {
                float line = fmaf(magnitude, rises[decade], starts[decade]);
                position = line < position ? line : position;
            }
            int32_t bits = (int32_t)as_bits(relative), lowest = is_signed ? 0 : bits < 1 ? bits : 1;
            int32_t number = is_signed ? 127 + (int32_t)copysignf(position, relative) : (int32_t)position;
            codes[i] = (uint8_t)(number < lowest ? lowest : number);
        }
    }
}

/* Reads `count` elements of both moments from `start` on, which are not stored in fp32. */
ONCE void load_moments(const void *m_in, const void *v_in, int64_t start, int64_t count, float *m, float *v,
                       const Settings *s) {
    if (s->moments == MOMENTS_8BIT) {
        int64_t block = start / CODE_BLOCK;
        decode((const uint8_t *)m_in + start, s->scales_in[0] + block, s->codes[0], count, 1, m);
        decode((const uint8_t *)v_in + start, s->scales_in[1] + block, s->codes[1], count, 0, v);
        return;
    }
    const uint16_t *stored_m = (const uint16_t *)m_in + start, *stored_v = (const uint16_t *)v_in + start;
    for (int64_t i = 0; i < count; i++) {
        m[i] = bf16_as_float(stored_m[i]);
        v[i] = bf16_as_float(stored_v[i]);
    }
}

/* Stores `count` elements of both moments from `start` on, which is in `item`, rounded. */
ONCE void store_moments(void *m, void *v, int64_t start, int64_t count, const float *new_m, const float *new_v,
                        Item item, const Settings *s) {
    if (s->moments == MOMENTS_8BIT) {
        __attribute__((aligned(64))) uint8_t codes_m[BLOCK], codes_v[BLOCK];
        int64_t block = start / CODE_BLOCK;
        encode(new_m, count, s->codes[0], 1, codes_m, s->scales[0] + block);
        encode(new_v, count, s->codes[1], 0, codes_v, s->scales[1] + block);
        put((uint8_t *)m + start, codes_m, count, s->past_caches);
        put((uint8_t *)v + start, codes_v, count, s->past_caches);
        return;
    }
    __attribute__((aligned(64))) uint16_t rounded_m[BLOCK], rounded_v[BLOCK];
    uint64_t keys = step_keys((uint64_t)item.random_key, (uint64_t)s->step);
    uint32_t low_key = (uint32_t)keys, high_key = (uint32_t)(keys >> 32);
    uint32_t first = (uint32_t)(item.first + start - item.start);
    for (int64_t i = 0; i < count; i++) {
        uint32_t random = random_bits(first + (uint32_t)i, low_key, high_key);
        rounded_m[i] = round_stochastically(new_m[i], random & 0xffffu);
        rounded_v[i] = round_stochastically(new_v[i], random >> 16);
    }
    put((uint16_t *)m + start, rounded_m, count * sizeof *rounded_m, s->past_caches);
    put((uint16_t *)v + start, rounded_v, count * sizeof *rounded_v, s->past_caches);
}

/* The mean of several ranks' gradients. The arithmetic is that of torch's `add_(values, alpha=share)` in fp32: the first
   rank's product is rounded, and each later one is fused with its sum where the processor does so. */

INLINE float fp32_as_float(float value) { return value; }

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

#define DEFINE_SUM(NAME, TYPE, LOAD)                                                                               \
    INLINE void NAME(const TYPE *values, int64_t count, float share, int first, float *sums) {                 \
        if (first)                                                                                             \
            for (int64_t i = 0; i < count; i++)                                                                \
                sums[i] = LOAD(values[i]) * share;                                                             \
        else                                                                                                   \
            for (int64_t i = 0; i < count; i++)                                                                \
                sums[i] = product_added(LOAD(values[i]), share, sums[i]);                                      \
    }

DEFINE_SUM(add_fp32, float, fp32_as_float)
DEFINE_SUM(add_bf16, uint16_t, bf16_as_float)
DEFINE_SUM(add_fp16, uint16_t, fp16_as_float)

/* Writes the mean of at most `BLOCK` elements from `start` on. */
INLINE void mean_block(int64_t start, int64_t count, int64_t num_sources, const Source *sources, float share,
                       float *sums) {
    for (int64_t rank = 0; rank < num_sources; rank++) {
        const Source source = sources[rank];
        if (source.kind == FP32)
            add_fp32((const float *)source.values + start, count, share, rank == 0, sums);
        else if (source.kind == BF16)
            add_bf16((const uint16_t *)source.values + start, count, share, rank == 0, sums);
        else
            add_fp16((const uint16_t *)source.values + start, count, share, rank == 0, sums);
    }
}

enum {
    ITEM = 1 << 15,     /* most elements of an `Item`, as in adam.py */
    MEAN_ITEM = 1 << 16 /* elements of a mean that a thread takes at a time, as in rank_mean.py */
};

/* Writes the mean of an item, which stays in the second cache until its step reads it. */
ONCE void mean_item(Item item, const Settings *s, float *mean) {
    for (int64_t start = item.start; start < item.end; start += BLOCK)
        mean_block(start, item.end - start < BLOCK ? item.end - start : BLOCK, s->num_sources, s->sources, s->share,
                   mean + (start - item.start));
}

/* Writes the mean. `total` may be the array of one of the sources: a block is read before it is written. */
void rank_mean(int64_t count, float *total, int64_t num_sources, const Source *sources, float share, int past_caches,
               int threads) {
    _Pragma("omp parallel for schedule(dynamic) if(count > MEAN_ITEM) num_threads(threads)")
    for (int64_t item = 0; item < count; item += MEAN_ITEM) {
        const int64_t end = count - item < MEAN_ITEM ? count : item + MEAN_ITEM;
        for (int64_t start = item; start < end; start += BLOCK) {
            const int64_t numel = end - start < BLOCK ? end - start : BLOCK;
            __attribute__((aligned(64))) float sums[BLOCK];
            mean_block(start, numel, num_sources, sources, share, sums);
            put(total + start, sums, numel * sizeof *total, past_caches);
        }
        fence(); /* before the end of the loop, which other threads wait for */
    }
}

/* Writes the sum of the squares of each `MEAN_ITEM` elements of the mean, in an order that no number of threads changes. */
void rank_mean_squares(int64_t count, double *squares, int64_t num_sources, const Source *sources, float share,
                       int threads) {
    enum { LANES = 16 };
    _Pragma("omp parallel for schedule(dynamic) if(count > MEAN_ITEM) num_threads(threads)")
    for (int64_t item = 0; item < count; item += MEAN_ITEM) {
        const int64_t end = count - item < MEAN_ITEM ? count : item + MEAN_ITEM;
        double lanes[LANES] = {0};
        for (int64_t start = item; start < end; start += BLOCK) {
            const int64_t numel = end - start < BLOCK ? end - start : BLOCK;
            __attribute__((aligned(64))) float sums[BLOCK];
            mean_block(start, numel, num_sources, sources, share, sums);
            int64_t i = 0;
            for (; i + LANES <= numel; i += LANES)
                for (int lane = 0; lane < LANES; lane++)
                    lanes[lane] += (double)sums[i + lane] * sums[i + lane];
            for (; i < numel; i++)
                lanes[0] += (double)sums[i] * sums[i];
        }
        double sum = 0;
        for (int lane = 0; lane < LANES; lane++)
            sum += lanes[lane];
        squares[item / MEAN_ITEM] = sum;
    }
}

/* Defines a function over `count` items: threads share the items, and an item is one vectorised loop, or two with a
   call of `root` between them for each block. New values go to the addresses that hold the old ones, or to others: by
   ordinary stores; or, past the caches, one block at a time through a buffer that fits into the first cache. A step that
   stores some of the arrays has a loop of its own; with `root`, which reads a block of moments, it uses the buffer.
   Moments that are not stored in fp32 are in the buffer, too, from when they are read. */
#define ARRAYS(WEIGHT, MASTER, GRADIENT)                                                                      \
    const WEIGHT *weights_in, const MASTER *master_in, const float *m_in, const float *v_in, WEIGHT *weights, \
        MASTER *master, float *m, float *v, const GRADIENT *gradient
#define GIVEN weights_in, master_in, m_in, v_in, weights, master, m, v, gradient
#define SHIFTED(BY) weights_in + BY, master_in + BY
#define DEFINE(NAME, WEIGHT, MASTER, GRADIENT, LOAD_MASTER, LOAD_GRADIENT, STORE)                             \
    INLINE void NAME##_range(int64_t start, int64_t end, ARRAYS(WEIGHT, MASTER, GRADIENT), const Settings s,  \
                             int decoupled, int tail, int parts, int rounded) {                               \
        _Pragma("GCC ivdep")                                                                                  \
        for (int64_t i = start; i < end; i++) {                                                               \
            float p = LOAD_MASTER, g = scaled_gradient(LOAD_GRADIENT, p, &s, decoupled);                      \
            float first = first_moment(m_in[i], g, &s);                                                       \
            float second = tail ? second_moment_in_tail(v_in[i], g, &s) : second_moment(v_in[i], g, &s);      \
            if (parts & MOMENTS) {                                                                            \
                m[i] = first;                                                                                 \
                v[i] = second;                                                                                \
            }                                                                                                 \
            p = stepped(p, first, sqrtf(second), &s, decoupled, rounded);                                     \
            STORE;                                                                                            \
        }                                                                                                     \
    }                                                                                                         \
    INLINE void NAME##_block(int64_t start, int64_t end, ARRAYS(WEIGHT, MASTER, GRADIENT), const Settings s,  \
                             int decoupled) {                                                                 \
        const int parts = ALL;                                                                                \
        float roots[BLOCK];                                                                                   \
        _Pragma("GCC ivdep")                                                                                  \
        for (int64_t i = start; i < end; i++) {                                                               \
            float p = LOAD_MASTER, g = scaled_gradient(LOAD_GRADIENT, p, &s, decoupled);                      \
            m[i] = first_moment(m_in[i], g, &s);                                                              \
            v[i] = second_moment(v_in[i], g, &s);                                                             \
        }                                                                                                     \
        s.root((int)(end - start), v + start, roots, MKL_MODE);                                               \
        _Pragma("GCC ivdep")                                                                                  \
        for (int64_t i = start; i < end; i++) {                                                               \
            float p = stepped(LOAD_MASTER, m[i], roots[i - start], &s, decoupled, 0);                         \
            STORE;                                                                                            \
        }                                                                                                     \
    }                                                                                                         \
    INLINE void NAME##_past(int64_t start, int64_t stop, Item item, ARRAYS(WEIGHT, MASTER, GRADIENT),         \
                            const Settings s, int decoupled, int tail) {                                      \
        __attribute__((aligned(64))) float new_m[BLOCK], new_v[BLOCK];                                        \
        __attribute__((aligned(64))) MASTER new_master[BLOCK];                                                \
        __attribute__((aligned(64))) WEIGHT new_weights[BLOCK];                                               \
        for (; start < stop; start += BLOCK) {                                                                \
            int64_t end = stop - start < BLOCK ? stop : start + BLOCK, count = end - start;                   \
            int rounded = s.moments != MOMENTS_FP32;                                                          \
            const float *old_m = rounded ? new_m : m_in + start, *old_v = rounded ? new_v : v_in + start;     \
            if (rounded) {                                                                                    \
                load_moments(m_in, v_in, start, count, new_m, new_v, &s);                                     \
                if (s.parts == MOMENTS) /* no new weights are computed */                                     \
                    NAME##_range(0, count, SHIFTED(start), old_m, old_v, new_weights, new_master, new_m,      \
                                 new_v, gradient + start, s, decoupled, tail, MOMENTS, 1);                    \
                else                                                                                          \
                    NAME##_range(0, count, SHIFTED(start), old_m, old_v, new_weights, new_master, new_m,      \
                                 new_v, gradient + start, s, decoupled, tail, ALL, 1);                        \
            } else if (s.root) {                                                                              \
                NAME##_block(0, count, SHIFTED(start), old_m, old_v, new_weights, new_master, new_m, new_v,   \
                             gradient + start, s, decoupled);                                                 \
            } else {                                                                                          \
                NAME##_range(0, count, SHIFTED(start), old_m, old_v, new_weights, new_master, new_m, new_v,   \
                             gradient + start, s, decoupled, tail, ALL, 0);                                   \
            }                                                                                                 \
            if (s.parts & MOMENTS && rounded) {                                                               \
                store_moments(m, v, start, count, new_m, new_v, item, &s);                                    \
            } else if (s.parts & MOMENTS) {                                                                   \
                put(m + start, new_m, count * sizeof *m, s.past_caches);                                      \
                put(v + start, new_v, count * sizeof *v, s.past_caches);                                      \
            }                                                                                                 \
            if (s.parts & MASTERS && (void *)master != (void *)weights)                                       \
                put(master + start, new_master, count * sizeof *master, s.past_caches);                       \
            if (s.parts & WEIGHTS)                                                                            \
                put(weights + start, new_weights, count * sizeof *weights, s.past_caches);                    \
        }                                                                                                     \
    }                                                                                                         \
    INLINE void NAME##_parts(Item item, ARRAYS(WEIGHT, MASTER, GRADIENT), const Settings s, int decoupled,    \
                             int parts) {                                                                     \
        NAME##_range(item.start, item.tail, GIVEN, s, decoupled, 0, parts, 0);                                \
        NAME##_range(item.tail, item.end, GIVEN, s, decoupled, 1, parts, 0);                                  \
    }                                                                                                         \
    INLINE void NAME##_item(Item item, ARRAYS(WEIGHT, MASTER, GRADIENT), const Settings s, int decoupled) {   \
        if (s.past_caches || s.moments != MOMENTS_FP32 || (s.root && s.parts != ALL)) {                       \
            int64_t tail = s.root ? item.end : item.tail;                                                     \
            NAME##_past(item.start, tail, item, GIVEN, s, decoupled, 0);                                      \
            NAME##_past(tail, item.end, item, GIVEN, s, decoupled, 1);                                        \
            fence();                                                                                          \
        } else if (s.root) {                                                                                  \
            for (int64_t start = item.start; start < item.end; start += BLOCK) {                              \
                int64_t end = item.end - start < BLOCK ? item.end : start + BLOCK;                            \
                NAME##_block(start, end, GIVEN, s, decoupled);                                                \
            }                                                                                                 \
        } else if (s.parts == ALL) {                                                                          \
            NAME##_parts(item, GIVEN, s, decoupled, ALL);                                                     \
        } else if (s.parts & MOMENTS) {                                                                       \
            if (s.parts & MASTERS)                                                                            \
                NAME##_parts(item, GIVEN, s, decoupled, MASTERS | MOMENTS);                                   \
            else                                                                                              \
                NAME##_parts(item, GIVEN, s, decoupled, MOMENTS);                                             \
        } else if (s.parts & MASTERS) {                                                                       \
            NAME##_parts(item, GIVEN, s, decoupled, WEIGHTS | MASTERS);                                       \
        } else {                                                                                              \
            NAME##_parts(item, GIVEN, s, decoupled, WEIGHTS);                                                 \
        }                                                                                                     \
    }                                                                                                         \
    void NAME(int64_t count, const Item *items, ARRAYS(WEIGHT, MASTER, GRADIENT), const Settings *settings) { \
        const Settings s = *settings;                                                                         \
        const GRADIENT *const whole = gradient;                                                               \
        _Pragma("omp parallel for schedule(dynamic) if(count > 1) num_threads(s.threads)")                    \
        for (int64_t index = 0; index < count; index++) {                                                     \
            __attribute__((aligned(64))) float mean[ITEM];                                                    \
            const GRADIENT *gradient = whole;                                                                 \
            if (s.sources) {                                                                                  \
                mean_item(items[index], &s, mean);                                                            \
                gradient = (const GRADIENT *)mean - items[index].start; /* GRADIENT is float */               \
            }                                                                                                 \
            if (s.decoupled)                                                                                  \
                NAME##_item(items[index], GIVEN, s, 1);                                                       \
            else                                                                                              \
                NAME##_item(items[index], GIVEN, s, 0);                                                       \
        }                                                                                                     \
    }

/* fp32 weights, which are their own masters: `master` is not used. */
DEFINE(adam_fp32, float, float, float, weights_in[i], gradient[i], if (parts & WEIGHTS) weights[i] = p)

/* bf16 weights beside fp32 masters. */
#define STORE_WHOLE { \
    if (parts & MASTERS) master[i] = p; \
    if (parts & WEIGHTS) weights[i] = as_bf16(p); \
}
DEFINE(adam_whole_bf16, uint16_t, float, uint16_t, master_in[i], bf16_as_float(gradient[i]), STORE_WHOLE)
DEFINE(adam_whole_fp32, uint16_t, float, float, master_in[i], gradient[i], STORE_WHOLE)

/* bf16 weights that are the upper half of their masters: `master` is the lower one. */
#define STORE_SPLIT { \
    uint32_t bits = splittable(p); \
    if (parts & WEIGHTS) weights[i] = (uint16_t)((bits + 0x8000u) >> 16); \
    if (parts & MASTERS) master[i] = (int16_t)bits; \
}
DEFINE(adam_split_bf16, uint16_t, int16_t, uint16_t, join(weights_in[i], master_in[i]), bf16_as_float(gradient[i]), STORE_SPLIT)
DEFINE(adam_split_fp32, uint16_t, int16_t, float, join(weights_in[i], master_in[i]), gradient[i], STORE_SPLIT)

/* A call of one of the functions above, whose array arguments are in their order. */
typedef struct {
    void (*function)(int64_t, const Item *, const void *, const void *, const void *, const void *, void *, void *,
                     void *, void *, const void *, const Settings *);
    int64_t count;
    const Item *items;
    void *arrays[9];
    Settings settings;
} Call;

/* Makes calls one after the other: between two of them no interpreter's lock is waited for. */
void adam_calls(int64_t count, const Call *calls) {
    for (const Call *call = calls; call < calls + count; call++) {
        void *const *a = call->arrays;
        call->function(call->count, call->items, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], &call->settings);
    }
}
