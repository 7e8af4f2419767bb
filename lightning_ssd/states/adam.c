/* One pass of Adam or AdamW over a flat: gradient in, states, master weights and compute weights out.

   The arithmetic is that of torch's fused CPU kernel (aten/src/ATen/native/cpu/FusedAdamKernel.cpp), operation by
   operation, so that both give the same bits; compile with -ffp-contract=off, or that is lost. Each element is read and
   written once: 26 bytes of memory traffic with split master weights, 28 with whole ones, where conversions around
   a kernel of their own would take 40. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float scale;           /* of the gradient in fp32; negative to maximize */
    float decay;           /* decoupled: what weights are multiplied with; else what is added of them to the gradient */
    float lerp;            /* 1 - beta1, below 0.5 */
    float beta2;
    float one_minus_beta2;
    float correction;      /* sqrt(1 - beta2^step) */
    float eps;
    float step_size;       /* -lr / (1 - beta1^step) */
    int32_t decoupled;
    int32_t threads;
} Settings;

#define INLINE static inline __attribute__((always_inline))

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

/* To nearest, ties to even; a NaN stays one. */
INLINE uint16_t as_bf16(float value) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* As in split.py. */
INLINE float join(uint16_t weight, int16_t low) {
    return as_float(((uint32_t)weight << 16) + (uint32_t)(int32_t)low);
}

INLINE uint32_t splittable(float value) {
    uint32_t bits = as_bits(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
}

/* Steps one element, from the states in `m_in` and `v_in` to those in `m_out` and `v_out`; returns the new master. */
INLINE float stepped(float p, float g, float m_in, float v_in, float *m_out, float *v_out, const Settings *s,
                     int decoupled) {
    g = g * s->scale;
    if (decoupled)
        p = p * s->decay;
    else
        g = fmaf(p, s->decay, g);
    float m = fmaf(s->lerp, g - m_in, m_in);
    float v = fmaf(s->one_minus_beta2 * g, g, v_in * s->beta2);
    *m_out = m;
    *v_out = v;
    return p + s->step_size * m / (sqrtf(v) / s->correction + s->eps);
}

enum { CHUNK = 1 << 15 };

/* Defines a function over `count` elements: threads take chunks, and a chunk is one vectorised loop. What comes out may
   be what came in, or elsewhere. */
#define DEFINE(NAME, WEIGHT, KEPT, GRADIENT, LOAD_MASTER, LOAD_GRADIENT, STORE)                              \
    INLINE void NAME##_chunk(int64_t start, int64_t end, const WEIGHT *weights_in, const KEPT *kept_in,      \
                             const float *m_in, const float *v_in, WEIGHT *weights, KEPT *kept, float *m,    \
                             float *v, const GRADIENT *gradient, const Settings s, int decoupled) {          \
        _Pragma("GCC ivdep")                                                                                 \
        for (int64_t i = start; i < end; i++) {                                                              \
            float p = stepped(LOAD_MASTER, LOAD_GRADIENT, m_in[i], v_in[i], &m[i], &v[i], &s, decoupled);    \
            STORE;                                                                                           \
        }                                                                                                    \
    }                                                                                                        \
    void NAME(int64_t count, const WEIGHT *weights_in, const KEPT *kept_in, const float *m_in,               \
              const float *v_in, WEIGHT *weights, KEPT *kept, float *m, float *v, const GRADIENT *gradient,  \
              const Settings *settings) {                                                                    \
        const Settings s = *settings;                                                                        \
        _Pragma("omp parallel for schedule(dynamic) if(count > CHUNK) num_threads(s.threads)")                         \
        for (int64_t start = 0; start < count; start += CHUNK) {                                             \
            int64_t end = count - start < CHUNK ? count : start + CHUNK;                                     \
            if (s.decoupled)                                                                                 \
                NAME##_chunk(start, end, weights_in, kept_in, m_in, v_in, weights, kept, m, v, gradient, s, 1); \
            else                                                                                             \
                NAME##_chunk(start, end, weights_in, kept_in, m_in, v_in, weights, kept, m, v, gradient, s, 0); \
        }                                                                                                    \
    }

/* fp32 weights, which are their own masters: `kept` is not used. */
DEFINE(adam_fp32, float, float, float, weights_in[i], gradient[i], weights[i] = p)

/* bf16 weights beside fp32 masters. */
#define STORE_WHOLE { kept[i] = p; weights[i] = as_bf16(p); }
DEFINE(adam_whole_bf16, uint16_t, float, uint16_t, kept_in[i], bf16_as_float(gradient[i]), STORE_WHOLE)
DEFINE(adam_whole_fp32, uint16_t, float, float, kept_in[i], gradient[i], STORE_WHOLE)

/* bf16 weights that are the upper half of their masters: `kept` is the lower one. */
#define STORE_SPLIT { uint32_t bits = splittable(p); weights[i] = (uint16_t)((bits + 0x8000u) >> 16); kept[i] = (int16_t)bits; }
DEFINE(adam_split_bf16, uint16_t, int16_t, uint16_t, join(weights_in[i], kept_in[i]), bf16_as_float(gradient[i]), STORE_SPLIT)
DEFINE(adam_split_fp32, uint16_t, int16_t, float, join(weights_in[i], kept_in[i]), gradient[i], STORE_SPLIT)
