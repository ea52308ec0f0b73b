/* Vectors of floats as GCC's and Clang's extension has them, and what the kernels need on them. NaN and infinity mean what they mean. */
#ifndef ALIGNER_VECTOR_H
#define ALIGNER_VECTOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

#ifndef LANES
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* anywhere in memory */

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec v) { *(loose *)p = v; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }

INLINE float sum(vec v) {
    float total[LANES];
    store(total, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) total[i] += total[i + half];
    return total[0];
}

INLINE float largest(vec v) {
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
}

/* out[i] = sum(v[i]) for four vectors */
INLINE void sum4(const vec v[4], float *out) {
#if defined(__AVX__) && LANES == 8 /* the compiler's own name: immintrin.h takes longer to read than all the rest to compile */
    vec pairs = __builtin_ia32_haddps256(__builtin_ia32_haddps256(v[0], v[1]), __builtin_ia32_haddps256(v[2], v[3]));
    for (int i = 0; i < 4; i++) out[i] = pairs[i] + pairs[i + 4];
#else
    for (int i = 0; i < 4; i++) out[i] = sum(v[i]);
#endif
}

/* e^x within two units in the last place: 2^n e^r with |r| <= ln(2)/2 (Cephes). 0 below -87.3; beyond 88.3 what it is there. */
INLINE vec exponential(vec x) {
    const vec shift = all(12582912.0f); /* adding it rounds to an integer, which is then in the lowest bits */
    const vec least = all(-87.3f), most = all(88.3f);
    ivec below = x < least;
    x = choose(x > most, most, x);
    vec shifted = choose(below, least, x) * 1.44269504088896341f + shift, n = shifted - shift;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = ((ivec)shifted - (ivec)shift + 127) << 23;
    return choose(below, (vec){0}, p * (vec)power);
}

#endif
