/* The arithmetic of adam.c on a GPU: the same operations with the same roundings, of torch's fused kernel where it has
   no tail, so that a step has the same bits wherever it is made. Products and sums are fused where fmaf is written, and
   nowhere else: the functions below are those of the GPU whose results a compiler never contracts. */

typedef struct { /* as in adam.c */
    float scale, decay, lerp, beta2, one_minus_beta2, correction, eps, step_size;
    int decoupled, threads, past_caches, parts;
    void *root;
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

static __device__ __forceinline__ float stepped(float p, float g, float *m, float *v, const Settings *s) {
    g = __fmul_rn(g, s->scale);
    if (!s->decoupled)
        g = __fmaf_rn(p, s->decay, g);
    float first = __fmaf_rn(s->lerp, __fsub_rn(g, *m), *m);
    float second = __fmaf_rn(__fmul_rn(s->one_minus_beta2, g), g, __fmul_rn(*v, s->beta2));
    *m = first;
    *v = second;
    if (s->decoupled)
        p = __fmul_rn(p, s->decay);
    float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(second), s->correction), s->eps);
    return __fadd_rn(p, __fdiv_rn(__fmul_rn(s->step_size, first), root));
}

/* Defines a function that steps `count` elements from `start` on, in place. */
#define DEFINE(NAME, WEIGHT, MASTER, GRADIENT, LOAD_MASTER, LOAD_GRADIENT, STORE)                                \
    extern "C" __global__ void NAME(long long start, long long count, WEIGHT *weights, MASTER *master, float *m, \
                                    float *v, const GRADIENT *gradient, const Settings s) {                      \
        long long stride = (long long)gridDim.x * blockDim.x;                                                    \
        for (long long i = start + (long long)blockIdx.x * blockDim.x + threadIdx.x; i < start + count;          \
             i += stride) {                                                                                      \
            float p = stepped(LOAD_MASTER, LOAD_GRADIENT, m + i, v + i, &s);                                     \
            STORE;                                                                                               \
        }                                                                                                        \
    }

DEFINE(adam_fp32, float, float, float, weights[i], gradient[i], weights[i] = p)

#define STORE_WHOLE { master[i] = p; weights[i] = as_bf16(p); }
DEFINE(adam_whole_bf16, unsigned short, float, unsigned short, master[i], as_float((unsigned)gradient[i] << 16), STORE_WHOLE)
DEFINE(adam_whole_fp32, unsigned short, float, float, master[i], gradient[i], STORE_WHOLE)

#define STORE_SPLIT { unsigned bits = splittable(p); weights[i] = (unsigned short)((bits + 0x8000u) >> 16); master[i] = (short)bits; }
DEFINE(adam_split_bf16, unsigned short, short, unsigned short, join(weights[i], master[i]), as_float((unsigned)gradient[i] << 16), STORE_SPLIT)
DEFINE(adam_split_fp32, unsigned short, short, float, join(weights[i], master[i]), gradient[i], STORE_SPLIT)
