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
   and rounded when they are stored, so that a step's weights are those of the moments before rounding. Such steps have
   no bits of torch's to reproduce, and multiply with a reciprocal where torch divides twice.

   With several ranks, a step reads all ranks' gradients, and computes their mean as it needs it: see `Source`. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

typedef struct { /* as in dynamic_code.py */
    float numbers[256];
    uint8_t bytes[3][256];
    uint16_t ends[32], slopes[64], starts[64];
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
#define ONCE static __attribute__((noinline, noclone)) /* compiled once: copies would take seconds to compile */

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

INLINE float second_moment(float v, float g, const Settings *s, int tail) {
    float whole = fmaf(s->one_minus_beta2 * g, g, v * s->beta2);
    return tail ? fmaf(v, s->beta2, s->one_minus_beta2 * g * g) : whole;
}

INLINE float scaled_gradient(float g, float p, const Settings *s, int decoupled) {
    g = g * s->scale;
    return decoupled ? g : fmaf(p, s->decay, g);
}

/* Returns the new master weight. */
INLINE float stepped(float p, float m, float root, const Settings *s, int decoupled) {
    p = decoupled ? p * s->decay : p;
    return p + s->step_size * m / (root / s->correction + s->eps);
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

/* Moments that are not stored in fp32. A step computes in fp32, one block of elements after the other in the first
   cache: new moments, then new weights while the moments are rounded, since the processor divides beside other instructions.
   Blocks are so small that the next one is read from memory while the processor computes. */

enum { CODE_BLOCK = 256 }; /* as in dynamic_code.py */

typedef enum { ALONE, WHOLE, SPLIT } Masters; /* the weights in fp32; fp32 beside bf16 weights; their lower halves */

typedef struct {           /* from the first element of a block on; new values may replace the old ones */
    const char *weights_in, *master_in, *m_in, *v_in, *gradient;
    char *weights, *master, *m, *v;
} Arrays;

typedef struct {
    __attribute__((aligned(64))) float m[CODE_BLOCK], v[CODE_BLOCK]; /* new moments */
    Arrays arrays;
    float scales[2];                   /* of the old moments in 8 bits */
    uint32_t largest[2];               /* of the new moments in 8 bits, see `rank` */
    float inverses[2];                 /* reciprocals of the new scales, or 0 */
    uint32_t first, low_key, high_key; /* number of the first element in its parameter, and keys of random numbers */
    int past_caches;
} Block;

/* Orders values by their magnitudes: the bits of an fp32 number, whose sign comes last. */
INLINE uint32_t rank(float value) {
    uint32_t bits = as_bits(value);
    return bits << 1 | bits >> 31;
}

/* Stores the scale of a block, whose value of largest magnitude has a rank; returns its reciprocal, or 0 for a block
   without codes. */
INLINE float scale_of(uint32_t largest, float *scale) {
    const uint32_t magnitude = largest >> 1;
    if (magnitude >= 0x00800000 && magnitude < 0x7f800000) {
        *scale = as_float(largest << 31 | magnitude);
        return 1.0f / *scale;
    }
    *scale = magnitude < 0x00800000 ? 0.0f : as_float(0x7fc00000u);
    return 0.0f;
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

/* A piece of 32 elements is two vectors, of its even elements and of its odd ones: so 16-bit values become fp32 numbers,
   and those become 16-bit values, by shifts and masks, where moving elements would take longer. */
enum { PIECE = 32, ODD = 0xaaaaaaaa };

typedef struct {
    __m512 even, odd;
} Floats;

INLINE __m512i wide(uint32_t value) { return _mm512_set1_epi32((int32_t)value); }

INLINE __m512 wide_float(float value) { return _mm512_set1_ps(value); }

INLINE __m512i load(const char *from) { return _mm512_loadu_si512(from); }

/* 16-bit values are the upper halves of fp32 numbers. */
INLINE Floats floats_of(__m512i words) {
    return (Floats){_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
                    _mm512_castsi512_ps(_mm512_and_si512(words, wide(0xffff0000u)))};
}

/* Lower halves of `even`, and upper halves of `odd`. */
INLINE __m512i join_halves(__m512i even, __m512i odd) { return _mm512_mask_mov_epi16(even, ODD, odd); }

INLINE __m512i upper_halves(__m512i even, __m512i odd) { return join_halves(_mm512_srli_epi32(even, 16), odd); }

INLINE __m512i lower_halves(__m512i even, __m512i odd) { return join_halves(even, _mm512_slli_epi32(odd, 16)); }

/* Both halves of fp32 numbers. */
INLINE Floats joined(__m512i upper, __m512i lower) {
    return (Floats){_mm512_castsi512_ps(lower_halves(lower, upper)), _mm512_castsi512_ps(upper_halves(lower, upper))};
}

INLINE __m512i even_numbers(void) {
    return _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}

INLINE Floats load_fp32(const char *from, int i) {
    const __m512i lanes = even_numbers();
    __m512 first = _mm512_loadu_ps(from + 4 * i), second = _mm512_loadu_ps(from + 4 * i + 64);
    return (Floats){_mm512_permutex2var_ps(first, lanes, second),
                    _mm512_permutex2var_ps(first, _mm512_add_epi32(lanes, wide(1)), second)};
}

INLINE void store(char *to, __m512i values, int past_caches) {
    if (past_caches)
        _mm512_stream_si512((__m512i *)to, values);
    else
        _mm512_storeu_si512(to, values);
}

INLINE void store_fp32(char *to, int i, Floats values, int past_caches) {
    const __m512i lanes = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    __m512 first = _mm512_permutex2var_ps(values.even, lanes, values.odd);
    __m512 second = _mm512_permutex2var_ps(values.even, _mm512_add_epi32(lanes, wide(8)), values.odd);
    store(to + 4 * i, _mm512_castps_si512(first), past_caches);
    store(to + 4 * i + 64, _mm512_castps_si512(second), past_caches);
}

INLINE Floats load_master(const Arrays *a, int i, Masters masters) {
    if (masters != SPLIT)
        return load_fp32(masters == WHOLE ? a->master_in : a->weights_in, i);
    __m512i low = load(a->master_in + 2 * i);
    __m512i upper = _mm512_add_epi16(load(a->weights_in + 2 * i), _mm512_srai_epi16(low, 15)); /* borrows */
    return joined(upper, low);
}

/* Returns `bits` with the canonical NaN where `values` are NaN. */
INLINE __m512i canonical(__m512i bits, __m512 values) {
    return _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), wide(0x7fc00000));
}

INLINE __m512i random_words(uint32_t first, uint32_t low_key, uint32_t high_key) {
    __m512i bits = _mm512_add_epi32(even_numbers(), wide(first + low_key));
    bits = _mm512_mullo_epi32(_mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16)), wide(0x7FEB352Du));
    bits = _mm512_add_epi32(_mm512_xor_si512(bits, _mm512_srli_epi32(bits, 15)), wide(high_key));
    bits = _mm512_mullo_epi32(bits, wide(0x846CA68Bu));
    return _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
}

/* Returns 32 16-bit values; `random` has 16 bits for each. */
INLINE __m512i round_wide(const float *values, __m512i even, __m512i odd) {
    __m512 first = _mm512_load_ps(values), second = _mm512_load_ps(values + 16);
    return upper_halves(canonical(_mm512_add_epi32(_mm512_castps_si512(first), even), first),
                        canonical(_mm512_add_epi32(_mm512_castps_si512(second), odd), second));
}

/* Returns the entries of 64 codes in a table of 256 bytes. */
INLINE __m512i look_up(__m512i codes, const uint8_t *table) {
#if defined(__AVX512VBMI__)
    __m512i low = _mm512_permutex2var_epi8(load((const char *)table), codes, load((const char *)table + 64));
    __m512i high = _mm512_permutex2var_epi8(load((const char *)table + 128), codes, load((const char *)table + 192));
    return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(codes), high);
#else
    uint8_t entries[64];
    _mm512_storeu_si512(entries, codes);
    for (int i = 0; i < 64; i++)
        entries[i] = table[entries[i]];
    return load((const char *)entries);
#endif
}

/* Decodes 64 codes: the elements of two pieces, without the scale. */
INLINE void numbers_of(const char *codes, const DynamicCode *code, Floats numbers[2]) {
    /* Unpacking takes eight bytes of each 16 in turn. */
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), none = _mm512_setzero_si512();
    __m512i ordered = _mm512_permutexvar_epi64(order, load(codes)), low = look_up(ordered, code->bytes[0]);
    __m512i middle = look_up(ordered, code->bytes[1]), high = look_up(ordered, code->bytes[2]);
    __m512i lower[2] = {_mm512_unpacklo_epi8(none, low), _mm512_unpackhi_epi8(none, low)};
    __m512i upper[2] = {_mm512_unpacklo_epi8(middle, high), _mm512_unpackhi_epi8(middle, high)};
    for (int part = 0; part < 2; part++)
        numbers[part] = joined(upper[part], lower[part]);
}

INLINE Floats scaled(Floats values, float scale) {
    return (Floats){_mm512_mul_ps(values.even, wide_float(scale)), _mm512_mul_ps(values.odd, wide_float(scale))};
}

/* Returns the positions of 32 keys in 16 bits. */
INLINE __m512i positions_of(__m512i keys, const DynamicCode *code, int fraction) {
    __m512i exponent = _mm512_srli_epi16(keys, 11);
    __m512i end = _mm512_permutexvar_epi16(exponent, load((const char *)code->ends));
    exponent = _mm512_mask_add_epi16(exponent, _mm512_cmpge_epu16_mask(keys, end), exponent, _mm512_set1_epi16(32));
    const char *slopes = (const char *)code->slopes, *starts = (const char *)code->starts;
    __m512i slope = _mm512_permutex2var_epi16(load(slopes), exponent, load(slopes + 64));
    __m512i start = _mm512_permutex2var_epi16(load(starts), exponent, load(starts + 64));
    return _mm512_srli_epi16(_mm512_add_epi16(_mm512_mulhi_epu16(keys, slope), start), fraction);
}

/* The keys of dynamic_code.py. */
INLINE __m512i keys_of(__m512 even, __m512 odd) {
    __m512i first = _mm512_srli_epi32(_mm512_castps_si512(even), 12);
    return join_halves(first, _mm512_slli_epi32(_mm512_castps_si512(odd), 4));
}

INLINE __m512i encode_signed(const float *values, float inverse, const DynamicCode *code) {
    __m512 even = _mm512_mul_ps(_mm512_load_ps(values), wide_float(inverse)), least = wide_float(0x1p-25f);
    __m512 odd = _mm512_mul_ps(_mm512_load_ps(values + 16), wide_float(inverse));
    __m512i keys = keys_of(_mm512_range_ps(even, least, 0xb), _mm512_range_ps(odd, least, 0xb)); /* larger magnitudes */
    __mmask32 negative = _mm512_movepi16_mask(upper_halves(_mm512_castps_si512(even), _mm512_castps_si512(odd)));
    __m512i position = positions_of(keys, code, 5), zero = _mm512_set1_epi16(127);
    return _mm512_mask_sub_epi16(_mm512_add_epi16(zero, position), negative, zero, position); /* -1 is stored as 0 */
}

INLINE __m512i encode_unsigned(const float *values, float inverse, const DynamicCode *code) {
    __m512 even = _mm512_mul_ps(_mm512_load_ps(values), wide_float(inverse)), least = wide_float(0x1p-25f);
    __m512 odd = _mm512_mul_ps(_mm512_load_ps(values + 16), wide_float(inverse)), none = _mm512_setzero_ps();
    even = _mm512_maskz_max_ps(_mm512_cmp_ps_mask(even, none, _CMP_GT_OQ), even, least);
    odd = _mm512_maskz_max_ps(_mm512_cmp_ps_mask(odd, none, _CMP_GT_OQ), odd, least);
    return positions_of(keys_of(even, odd), code, 4);
}

INLINE void store_codes(char *to, const __m512i words[2], int past_caches) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    store(to, _mm512_permutexvar_epi64(order, _mm512_packus_epi16(words[0], words[1])), past_caches);
}

INLINE void compute_moments(Block *b, const Settings *s, Masters masters, int gradient_size, int is_8bit) {
    const Arrays a = b->arrays;
    const float scale_m = b->scales[0], scale_v = b->scales[1];
    const __m512 decay = wide_float(s->decay), lerp = wide_float(s->lerp);
    const __m512 beta2 = wide_float(s->beta2), one_minus_beta2 = wide_float(s->one_minus_beta2);
    const int decoupled = s->decoupled;
    __m512i largest_m = wide(0), largest_v = wide(0);
    for (int start = 0; start < CODE_BLOCK; start += 2 * PIECE) {
        Floats numbers_m[2], numbers_v[2];
        if (is_8bit) {
            numbers_of(a.m_in + start, s->codes[0], numbers_m);
            numbers_of(a.v_in + start, s->codes[1], numbers_v);
        }
        for (int part = 0; part < 2; part++) {
            const int i = start + part * PIECE;
            Floats g = gradient_size == 2 ? floats_of(load(a.gradient + 2 * i)) : load_fp32(a.gradient, i);
            Floats m = is_8bit ? scaled(numbers_m[part], scale_m) : floats_of(load(a.m_in + 2 * i));
            Floats v = is_8bit ? scaled(numbers_v[part], scale_v) : floats_of(load(a.v_in + 2 * i));
            g = scaled(g, s->scale);
            if (!decoupled) {
                Floats p = load_master(&a, i, masters);
                g = (Floats){_mm512_fmadd_ps(p.even, decay, g.even), _mm512_fmadd_ps(p.odd, decay, g.odd)};
            }
            m.even = _mm512_fmadd_ps(lerp, _mm512_sub_ps(g.even, m.even), m.even);
            m.odd = _mm512_fmadd_ps(lerp, _mm512_sub_ps(g.odd, m.odd), m.odd);
            v.even = _mm512_fmadd_ps(_mm512_mul_ps(one_minus_beta2, g.even), g.even, _mm512_mul_ps(v.even, beta2));
            v.odd = _mm512_fmadd_ps(_mm512_mul_ps(one_minus_beta2, g.odd), g.odd, _mm512_mul_ps(v.odd, beta2));
            _mm512_store_ps(b->m + i, m.even);
            _mm512_store_ps(b->m + i + 16, m.odd);
            _mm512_store_ps(b->v + i, v.even);
            _mm512_store_ps(b->v + i + 16, v.odd);
            if (is_8bit) {
                largest_m = _mm512_max_epu32(largest_m, _mm512_rol_epi32(_mm512_castps_si512(m.even), 1));
                largest_m = _mm512_max_epu32(largest_m, _mm512_rol_epi32(_mm512_castps_si512(m.odd), 1));
                largest_v = _mm512_max_epu32(largest_v, _mm512_castps_si512(v.even));
                largest_v = _mm512_max_epu32(largest_v, _mm512_castps_si512(v.odd));
            }
        }
    }
    if (is_8bit) {
        b->largest[0] = _mm512_reduce_max_epu32(largest_m);
        b->largest[1] = _mm512_reduce_max_epu32(_mm512_rol_epi32(largest_v, 1));
    }
}

INLINE __m512 stepped_wide(__m512 p, __m512 m, __m512 v, const Settings *s) {
    __m512 divisor = _mm512_fmadd_ps(_mm512_sqrt_ps(v), wide_float(s->reciprocal), wide_float(s->eps));
    if (s->decoupled)
        p = _mm512_mul_ps(p, wide_float(s->decay));
    return _mm512_add_ps(p, _mm512_div_ps(_mm512_mul_ps(wide_float(s->step_size), m), divisor));
}

INLINE __m512i to_nearest(__m512i bits) {
    __m512i last_bit = _mm512_and_si512(_mm512_srli_epi32(bits, 16), wide(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, wide(0x7fff)), last_bit);
}

INLINE void step_weights(const Block *b, int i, const Settings *s, Masters masters) {
    const Arrays a = b->arrays;
    Floats p = load_master(&a, i, masters);
    p.even = stepped_wide(p.even, _mm512_load_ps(b->m + i), _mm512_load_ps(b->v + i), s);
    p.odd = stepped_wide(p.odd, _mm512_load_ps(b->m + i + 16), _mm512_load_ps(b->v + i + 16), s);
    if (masters == ALONE) {
        store_fp32(a.weights, i, p, b->past_caches);
        return;
    }
    __m512i even = canonical(_mm512_castps_si512(p.even), p.even), odd = canonical(_mm512_castps_si512(p.odd), p.odd);
    if (masters == SPLIT) {
        __m512i low = lower_halves(even, odd);
        __m512i weights = _mm512_sub_epi16(upper_halves(even, odd), _mm512_srai_epi16(low, 15)); /* rounds */
        store(a.weights + 2 * i, weights, b->past_caches);
        store(a.master + 2 * i, low, b->past_caches);
        return;
    }
    if (s->parts & MASTERS)
        store_fp32(a.master, i, p, b->past_caches);
    if (s->parts & WEIGHTS)
        store(a.weights + 2 * i, upper_halves(to_nearest(even), to_nearest(odd)), b->past_caches);
}

INLINE void compute_weights(const Block *b, const Settings *s, Masters masters, int is_8bit) {
    const Arrays a = b->arrays;
    for (int start = 0; start < CODE_BLOCK; start += 2 * PIECE) {
        __m512i codes_m[2], codes_v[2];
        for (int part = 0; part < 2; part++) {
            const int i = start + part * PIECE;
            if (s->parts != MOMENTS)
                step_weights(b, i, s, masters);
            if (is_8bit && s->parts & MOMENTS) {
                codes_m[part] = encode_signed(b->m + i, b->inverses[0], s->codes[0]);
                codes_v[part] = encode_unsigned(b->v + i, b->inverses[1], s->codes[1]);
            } else if (s->parts & MOMENTS) {
                __m512i even = random_words(b->first + (uint32_t)i, b->low_key, b->high_key);
                __m512i odd = random_words(b->first + (uint32_t)i + 1, b->low_key, b->high_key), low = wide(0xffff);
                __m512i m = round_wide(b->m + i, _mm512_and_si512(even, low), _mm512_and_si512(odd, low));
                __m512i v = round_wide(b->v + i, _mm512_srli_epi32(even, 16), _mm512_srli_epi32(odd, 16));
                store(a.m + 2 * i, m, b->past_caches);
                store(a.v + 2 * i, v, b->past_caches);
            }
        }
        if (is_8bit && s->parts & MOMENTS) {
            store_codes(a.m + start, codes_m, b->past_caches);
            store_codes(a.v + start, codes_v, b->past_caches);
        }
    }
}

#else

INLINE float load_master(const Arrays *a, int i, Masters masters) {
    if (masters == SPLIT)
        return join(((const uint16_t *)a->weights_in)[i], ((const int16_t *)a->master_in)[i]);
    return ((const float *)(masters == WHOLE ? a->master_in : a->weights_in))[i];
}

INLINE void compute_moments(Block *b, const Settings *s, Masters masters, int gradient_size, int is_8bit) {
    const Arrays a = b->arrays;
    const uint8_t *codes_m = (const uint8_t *)a.m_in, *codes_v = (const uint8_t *)a.v_in;
    const uint16_t *stored_m = (const uint16_t *)a.m_in, *stored_v = (const uint16_t *)a.v_in;
    const uint16_t *rounded_g = (const uint16_t *)a.gradient;
    const float *whole_g = (const float *)a.gradient;
    uint32_t largest_m = 0, largest_v = 0;
    _Pragma("GCC ivdep")
    for (int i = 0; i < CODE_BLOCK; i++) {
        float m = is_8bit ? s->codes[0]->numbers[codes_m[i]] * b->scales[0] : bf16_as_float(stored_m[i]);
        float v = is_8bit ? s->codes[1]->numbers[codes_v[i]] * b->scales[1] : bf16_as_float(stored_v[i]);
        float g = gradient_size == 2 ? bf16_as_float(rounded_g[i]) : whole_g[i];
        g = g * s->scale;
        if (!s->decoupled)
            g = fmaf(load_master(&a, i, masters), s->decay, g);
        b->m[i] = first_moment(m, g, s);
        b->v[i] = second_moment(v, g, s, 0);
        largest_m = rank(b->m[i]) > largest_m ? rank(b->m[i]) : largest_m;
        largest_v = rank(b->v[i]) > largest_v ? rank(b->v[i]) : largest_v;
    }
    b->largest[0] = largest_m;
    b->largest[1] = largest_v;
}

INLINE void encode(const float *values, float inverse, const DynamicCode *code, int is_signed, uint8_t *codes) {
    _Pragma("GCC ivdep")
    for (int i = 0; i < CODE_BLOCK; i++) {
        float relative = values[i] * inverse, magnitude = fabsf(relative);
        uint32_t key = as_bits(magnitude > 0x1p-25f ? magnitude : 0x1p-25f) >> 12 & 0xffff;
        uint32_t line = (key >> 11) + (key >= code->ends[key >> 11] ? 32 : 0);
        int32_t position = (uint16_t)((key * code->slopes[line] >> 16) + code->starts[line]) >> (is_signed ? 5 : 4);
        int32_t number = is_signed ? 127 + (relative < 0 ? -position : position) : relative > 0 ? position : 0;
        codes[i] = (uint8_t)(number < 0 ? 0 : number); /* there is no code for -1 */
    }
}

INLINE void compute_weights(const Block *b, const Settings *s, Masters masters, int is_8bit) {
    const Arrays a = b->arrays;
    const int numel = s->parts == MOMENTS ? 0 : CODE_BLOCK;
    _Pragma("GCC ivdep")
    for (int i = 0; i < numel; i++) {
        float p = load_master(&a, i, masters), divisor = fmaf(sqrtf(b->v[i]), s->reciprocal, s->eps);
        if (s->decoupled)
            p = p * s->decay;
        p = p + s->step_size * b->m[i] / divisor;
        if (masters == SPLIT) {
            ((uint16_t *)a.weights)[i] = (uint16_t)((splittable(p) + 0x8000u) >> 16);
            ((int16_t *)a.master)[i] = (int16_t)splittable(p);
        } else if (masters == ALONE) {
            ((float *)a.weights)[i] = p;
        } else {
            if (s->parts & MASTERS)
                ((float *)a.master)[i] = p;
            if (s->parts & WEIGHTS)
                ((uint16_t *)a.weights)[i] = as_bf16(p);
        }
    }
    if (is_8bit && s->parts & MOMENTS) {
        encode(b->m, b->inverses[0], s->codes[0], 1, (uint8_t *)a.m);
        encode(b->v, b->inverses[1], s->codes[1], 0, (uint8_t *)a.v);
    } else if (s->parts & MOMENTS) {
        _Pragma("GCC ivdep")
        for (int i = 0; i < CODE_BLOCK; i++) {
            uint32_t random = random_bits(b->first + (uint32_t)i, b->low_key, b->high_key);
            ((uint16_t *)a.m)[i] = round_stochastically(b->m[i], random & 0xffffu);
            ((uint16_t *)a.v)[i] = round_stochastically(b->v[i], random >> 16);
        }
    }
}

#endif

/* Steps the elements of an item. */
INLINE void step_rounded(Item item, Arrays given, const Settings *s, Masters masters, int gradient_size, int is_8bit) {
    const int weight_size = masters == ALONE ? 4 : 2, moment_size = is_8bit ? 1 : 2;
    const int master_size = masters == WHOLE ? 4 : masters == SPLIT ? 2 : 0;
    uint64_t keys = step_keys((uint64_t)item.random_key, (uint64_t)s->step);
    Block b = {.low_key = (uint32_t)keys, .high_key = (uint32_t)(keys >> 32)};
    for (int64_t start = item.start; start < item.end; start += CODE_BLOCK) {
        const int64_t numel = item.end - start, index = start / CODE_BLOCK;
        const int is_whole = numel >= CODE_BLOCK;
        const Arrays a = {
            given.weights_in + start * weight_size, given.master_in + start * master_size,
            given.m_in + start * moment_size, given.v_in + start * moment_size,
            given.gradient + start * gradient_size,
            given.weights + start * weight_size, given.master + start * master_size,
            given.m + start * moment_size, given.v + start * moment_size,
        };
        /* The last elements are copied to a block of zeros, which change no scale. */
        __attribute__((aligned(64))) char weights[4 * CODE_BLOCK], master[4 * CODE_BLOCK], gradient[4 * CODE_BLOCK];
        __attribute__((aligned(64))) char m[2 * CODE_BLOCK], v[2 * CODE_BLOCK];
        if (is_whole) {
            b.arrays = a;
        } else {
            memset(weights, 0, sizeof weights), memcpy(weights, a.weights_in, numel * weight_size);
            memset(master, 0, sizeof master), memcpy(master, a.master_in, numel * master_size);
            memset(gradient, 0, sizeof gradient), memcpy(gradient, a.gradient, numel * gradient_size);
            memset(m, is_8bit ? 127 : 0, sizeof m), memcpy(m, a.m_in, numel * moment_size);
            memset(v, 0, sizeof v), memcpy(v, a.v_in, numel * moment_size);
            b.arrays = (Arrays){weights, master, m, v, gradient, weights, master, m, v};
        }
        uintptr_t addresses = (uintptr_t)a.weights | (uintptr_t)a.master | (uintptr_t)a.m | (uintptr_t)a.v;
        b.past_caches = is_whole && s->past_caches && addresses % 64 == 0;
        b.first = (uint32_t)(item.first + start - item.start);
        if (is_8bit) {
            b.scales[0] = s->scales_in[0][index];
            b.scales[1] = s->scales_in[1][index];
        }
        compute_moments(&b, s, masters, gradient_size, is_8bit);
        if (is_8bit && s->parts & MOMENTS) {
            b.inverses[0] = scale_of(b.largest[0], s->scales[0] + index);
            b.inverses[1] = scale_of(b.largest[1], s->scales[1] + index);
        }
        compute_weights(&b, s, masters, is_8bit);
        if (is_8bit && s->parts & MOMENTS && b.inverses[0] == 0.0f)
            memset(b.arrays.m, 127, CODE_BLOCK);
        if (is_8bit && s->parts & MOMENTS && b.inverses[1] == 0.0f)
            memset(b.arrays.v, 0, CODE_BLOCK);
        if (!is_whole) {
            if (s->parts & WEIGHTS)
                memcpy(a.weights, weights, numel * weight_size);
            if (s->parts & MASTERS)
                memcpy(a.master, master, numel * master_size);
            if (s->parts & MOMENTS) {
                memcpy(a.m, m, numel * moment_size);
                memcpy(a.v, v, numel * moment_size);
            }
        }
    }
    fence();
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
   ordinary stores; or, past the caches, one block at a time through a buffer that fits into the first cache.

   Each loop takes 0.05 s to compile, so only AdamW's steps, whole and in halves, have loops of their own. In all other
   cases, vectors are selected within one loop of `_block`, and the arrays to be stored are copied from the buffer. */
#define ARRAYS(WEIGHT, MASTER, GRADIENT)                                                                      \
    const WEIGHT *weights_in, const MASTER *master_in, const float *m_in, const float *v_in, WEIGHT *weights, \
        MASTER *master, float *m, float *v, const GRADIENT *gradient
#define GIVEN weights_in, master_in, m_in, v_in, weights, master, m, v, gradient
#define SHIFTED(BY) weights_in + BY, master_in + BY, m_in + BY, v_in + BY
#define AS_BYTES                                                                                              \
    (Arrays){(const char *)weights_in, (const char *)master_in, (const char *)m_in, (const char *)v_in,       \
             (const char *)gradient, (char *)weights, (char *)master, (char *)m, (char *)v}
#define DEFINE(NAME, MASTERS_ARE, WEIGHT, MASTER, GRADIENT, LOAD_MASTER, LOAD_GRADIENT, STORE)                \
    INLINE void NAME##_range(int64_t start, int64_t end, ARRAYS(WEIGHT, MASTER, GRADIENT), const Settings s,  \
                             int decoupled, int tail, int parts) {                                            \
        _Pragma("GCC ivdep")                                                                                  \
        for (int64_t i = start; i < end; i++) {                                                               \
            float p = LOAD_MASTER, g = scaled_gradient(LOAD_GRADIENT, p, &s, decoupled);                      \
            float first = first_moment(m_in[i], g, &s), second = second_moment(v_in[i], g, &s, tail);         \
            if (parts & MOMENTS) {                                                                            \
                m[i] = first;                                                                                 \
                v[i] = second;                                                                                \
            }                                                                                                 \
            p = stepped(p, first, sqrtf(second), &s, decoupled);                                              \
            STORE;                                                                                            \
        }                                                                                                     \
    }                                                                                                         \
    ONCE void NAME##_block(int64_t count, ARRAYS(WEIGHT, MASTER, GRADIENT), const Settings *settings,         \
                           int tail) {                                                                        \
        const Settings s = *settings;                                                                         \
        const int parts = ALL;                                                                                \
        float roots[BLOCK];                                                                                   \
        if (!s.root && s.decoupled && !tail) {                                                                \
            NAME##_range(0, count, GIVEN, s, 1, 0, ALL);                                                      \
            return;                                                                                           \
        }                                                                                                     \
        if (!s.root) {                                                                                        \
            NAME##_range(0, count, GIVEN, s, s.decoupled, tail, ALL);                                         \
            return;                                                                                           \
        }                                                                                                     \
        _Pragma("GCC ivdep")                                                                                  \
        for (int64_t i = 0; i < count; i++) {                                                                 \
            float p = LOAD_MASTER, g = scaled_gradient(LOAD_GRADIENT, p, &s, s.decoupled);                    \
            m[i] = first_moment(m_in[i], g, &s);                                                              \
            v[i] = second_moment(v_in[i], g, &s, 0);                                                          \
        }                                                                                                     \
        s.root((int)count, v, roots, MKL_MODE);                                                               \
        _Pragma("GCC ivdep")                                                                                  \
        for (int64_t i = 0; i < count; i++) {                                                                 \
            float p = stepped(LOAD_MASTER, m[i], roots[i], &s, s.decoupled);                                  \
            STORE;                                                                                            \
        }                                                                                                     \
    }                                                                                                         \
    ONCE void NAME##_blocks(int64_t start, int64_t stop, ARRAYS(WEIGHT, MASTER, GRADIENT),                    \
                            const Settings *s, int tail) {                                                    \
        __attribute__((aligned(64))) float new_m[BLOCK], new_v[BLOCK];                                        \
        __attribute__((aligned(64))) MASTER new_master[BLOCK];                                                \
        __attribute__((aligned(64))) WEIGHT new_weights[BLOCK];                                               \
        const int direct = !s->past_caches && s->parts == ALL;                                                \
        const int64_t size = direct && !s->root ? stop - start : BLOCK;                                       \
        for (; start < stop; start += size) {                                                                 \
            int64_t count = stop - start < size ? stop - start : size;                                        \
            if (direct) {                                                                                     \
                NAME##_block(count, SHIFTED(start), weights + start, master + start, m + start, v + start,    \
                             gradient + start, s, tail);                                                      \
                continue;                                                                                     \
            }                                                                                                 \
            NAME##_block(count, SHIFTED(start), new_weights, new_master, new_m, new_v, gradient + start, s,   \
                         tail);                                                                               \
            if (s->parts & MOMENTS) {                                                                         \
                put(m + start, new_m, count * sizeof *m, s->past_caches);                                     \
                put(v + start, new_v, count * sizeof *v, s->past_caches);                                     \
            }                                                                                                 \
            if (s->parts & MASTERS && (void *)master != (void *)weights)                                      \
                put(master + start, new_master, count * sizeof *master, s->past_caches);                      \
            if (s->parts & WEIGHTS)                                                                           \
                put(weights + start, new_weights, count * sizeof *weights, s->past_caches);                   \
        }                                                                                                     \
        fence();                                                                                              \
    }                                                                                                         \
    ONCE void NAME##_item(Item item, ARRAYS(WEIGHT, MASTER, GRADIENT), const Settings *settings) {            \
        const Settings s = *settings;                                                                         \
        const int first_half = MASTERS_ARE == WHOLE ? WEIGHTS : WEIGHTS | MASTERS;                            \
        int64_t start = item.start, stop = s.root ? item.end : item.tail;                                     \
        if (!s.root && !s.past_caches && s.decoupled) {                                                       \
            if (s.parts == first_half) {                                                                      \
                NAME##_range(start, stop, GIVEN, s, 1, 0, first_half);                                        \
                start = stop;                                                                                 \
            } else if (s.parts == (ALL & ~first_half)) {                                                      \
                NAME##_range(start, stop, GIVEN, s, 1, 0, ALL & ~first_half);                                 \
                start = stop;                                                                                 \
            }                                                                                                 \
        }                                                                                                     \
        NAME##_blocks(start, stop, GIVEN, &s, 0);                                                             \
        NAME##_blocks(stop, item.end, GIVEN, &s, 1);                                                          \
    }                                                                                                         \
    ONCE void NAME##_rounded(Item item, Arrays arrays, const Settings *s) {                                   \
        if (s->moments == MOMENTS_8BIT)                                                                       \
            step_rounded(item, arrays, s, MASTERS_ARE, sizeof(GRADIENT), 1);                                         \
        else                                                                                                  \
            step_rounded(item, arrays, s, MASTERS_ARE, sizeof(GRADIENT), 0);                                         \
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
            if (s.moments != MOMENTS_FP32)                                                                    \
                NAME##_rounded(items[index], AS_BYTES, &s);                                                   \
            else                                                                                              \
                NAME##_item(items[index], GIVEN, &s);                                                         \
        }                                                                                                     \
    }

/* fp32 weights, which are their own masters: `master` is not used. */
DEFINE(adam_fp32, ALONE, float, float, float, weights_in[i], gradient[i], if (parts & WEIGHTS) weights[i] = p)

/* bf16 weights beside fp32 masters. */
#define STORE_WHOLE { \
    if (parts & MASTERS) master[i] = p; \
    if (parts & WEIGHTS) weights[i] = as_bf16(p); \
}
DEFINE(adam_whole_bf16, WHOLE, uint16_t, float, uint16_t, master_in[i], bf16_as_float(gradient[i]), STORE_WHOLE)
DEFINE(adam_whole_fp32, WHOLE, uint16_t, float, float, master_in[i], gradient[i], STORE_WHOLE)

/* bf16 weights that are the upper half of their masters: `master` is the lower one. */
#define STORE_SPLIT { \
    uint32_t bits = splittable(p); \
    if (parts & WEIGHTS) weights[i] = (uint16_t)((bits + 0x8000u) >> 16); \
    if (parts & MASTERS) master[i] = (int16_t)bits; \
}
DEFINE(adam_split_bf16, SPLIT, uint16_t, int16_t, uint16_t, join(weights_in[i], master_in[i]), bf16_as_float(gradient[i]), STORE_SPLIT)
DEFINE(adam_split_fp32, SPLIT, uint16_t, int16_t, float, join(weights_in[i], master_in[i]), gradient[i], STORE_SPLIT)

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
