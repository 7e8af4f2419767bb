/* The arithmetic of adam.c on a GPU: the same operations with the same roundings, of torch's fused kernel where it has
   no tail, so that a step has the same bits wherever it is made. Products and sums are fused where fmaf is written, and
   nowhere else: the functions below are those of the GPU whose results a compiler never contracts. */

typedef struct { /* as in adam.c */
    float scale, decay, lerp, beta2, one_minus_beta2, correction, reciprocal, eps, step_size;
    int decoupled, threads, past_caches, parts, moments;
    long long step;
    void *root, *of_8_bits[6];
} Settings;

static __device__ __forceinline__ float as_float(unsigned bits) { return __uint_as_float(bits); }

static __device__ __forceinline__ unsigned as_bits(float value) { return __float_as_uint(value); }

static __device__ __forceinline__ unsigned short as_bf16(float value) {
    unsigned bits = as_bits(value);
    unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (unsigned short)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static __device__ __forceinline__ float join(unsigned short weight, short low) {
    return as_float(((unsigned)weight << 16) + (unsigned)(int)low);
}

static __device__ __forceinline__ unsigned splittable(float value) {
    unsigned bits = as_bits(value);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
}

static __device__ __forceinline__ float bf16_as_float(unsigned short value) { return as_float((unsigned)value << 16); }

/* As in rounding.py. */
static __device__ __forceinline__ unsigned random_bits(unsigned element, unsigned low_key, unsigned high_key) {
    unsigned bits = element + low_key;
    bits = (bits ^ bits >> 16) * 0x7FEB352Du;
    bits = ((bits ^ bits >> 15) + high_key) * 0x846CA68Bu;
    return bits ^ bits >> 16;
}

static __device__ __forceinline__ unsigned short round_stochastically(float value, unsigned random) {
    unsigned bits = as_bits(value);
    return (unsigned short)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + random) >> 16);
}

static __device__ __forceinline__ float stepped(float p, float g, float *m, float *v, const Settings *s, bool rounded) {
    g = __fmul_rn(g, s->scale);
    if (!s->decoupled)
        g = __fmaf_rn(p, s->decay, g);
    float first = __fmaf_rn(s->lerp, __fsub_rn(g, *m), *m);
    float second = __fmaf_rn(__fmul_rn(s->one_minus_beta2, g), g, __fmul_rn(*v, s->beta2));
    *m = first;
    *v = second;
    if (s->decoupled)
        p = __fmul_rn(p, s->decay);
    float root = __fsqrt_rn(second), step = __fmul_rn(s->step_size, first);
    float divisor = rounded ? __fmaf_rn(root, s->reciprocal, s->eps) : __fadd_rn(__fdiv_rn(root, s->correction), s->eps);
    return __fadd_rn(p, __fdiv_rn(step, divisor));
}

/* Defines a function that steps `count` elements from `start` on, in place. The first one is number `first` in its
   parameter, whose keys of random numbers in this step are `low_key` and `high_key`. */
#define DEFINE_ONE(NAME, WEIGHT, MASTER, MOMENT, GRADIENT, LOAD_MASTER, LOAD_MOMENT, LOAD_GRADIENT, STORE_MOMENTS, ROUNDED, STORE) \
    extern "C" __global__ void NAME(long long start, long long count, unsigned first, unsigned low_key,          \
                                    unsigned high_key, WEIGHT *weights, MASTER *master, MOMENT *m, MOMENT *v,    \
                                    const GRADIENT *gradient, const Settings s) {                                \
        long long stride = (long long)gridDim.x * blockDim.x;                                                    \
        for (long long i = start + (long long)blockIdx.x * blockDim.x + threadIdx.x; i < start + count;          \
             i += stride) {                                                                                      \
            float new_m = LOAD_MOMENT(m[i]), new_v = LOAD_MOMENT(v[i]);                                          \
            float p = stepped(LOAD_MASTER, LOAD_GRADIENT, &new_m, &new_v, &s, ROUNDED);                          \
            STORE_MOMENTS;                                                                                       \
            STORE;                                                                                               \
        }                                                                                                        \
    }

#define STORE_FP32 { m[i] = new_m; v[i] = new_v; }
#define STORE_BF16 { \
    unsigned random = random_bits(first + (unsigned)(i - start), low_key, high_key); \
    m[i] = round_stochastically(new_m, random & 0xffffu); \
    v[i] = round_stochastically(new_v, random >> 16); \
}
#define DEFINE(NAME, WEIGHT, MASTER, GRADIENT, LOAD_MASTER, LOAD_GRADIENT, STORE) \
    DEFINE_ONE(NAME##_moments_fp32, WEIGHT, MASTER, float, GRADIENT, LOAD_MASTER, , LOAD_GRADIENT, STORE_FP32, false, STORE) \
    DEFINE_ONE(NAME##_moments_bf16, WEIGHT, MASTER, unsigned short, GRADIENT, LOAD_MASTER, bf16_as_float, LOAD_GRADIENT, STORE_BF16, true, STORE)

DEFINE(adam_fp32, float, float, float, weights[i], gradient[i], weights[i] = p)

#define STORE_WHOLE { master[i] = p; weights[i] = as_bf16(p); }
DEFINE(adam_whole_bf16, unsigned short, float, unsigned short, master[i], bf16_as_float(gradient[i]), STORE_WHOLE)
DEFINE(adam_whole_fp32, unsigned short, float, float, master[i], gradient[i], STORE_WHOLE)

#define STORE_SPLIT { unsigned bits = splittable(p); weights[i] = (unsigned short)((bits + 0x8000u) >> 16); master[i] = (short)bits; }
DEFINE(adam_split_bf16, unsigned short, short, unsigned short, join(weights[i], master[i]), bf16_as_float(gradient[i]), STORE_SPLIT)
DEFINE(adam_split_fp32, unsigned short, short, float, join(weights[i], master[i]), gradient[i], STORE_SPLIT)
