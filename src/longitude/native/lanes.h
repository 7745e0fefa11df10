/* Sixteen channels side by side: what the loops over states are made of. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "parallel.h"

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#ifdef DOUBLE
typedef double real;
typedef int64_t bits;
#else
typedef float real;
typedef int32_t bits;
#endif
typedef real vec __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real)), may_alias));
typedef bits ivec __attribute__((vector_size(LANES * sizeof(real)), aligned(sizeof(real)), may_alias));
typedef int64_t num;

#define SAME(x) ((vec){0} + (real)(x))

INLINE vec pick(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return pick(a > b, a, b); } /* b where either is NaN */

/* Load the first `some` lanes from memory, the others are zeros; and store them. */
INLINE vec load(const real *at, int some) {
  if (some == LANES) return *(const vec *)at;
  vec x = {0};
  for (int i = 0; i < some; i++) x[i] = at[i];
  return x;
}
INLINE void store(real *at, vec x, int some) {
  if (some == LANES) *(vec *)at = x;
  else for (int i = 0; i < some; i++) at[i] = x[i];
}
/* The sums over the lanes of each of sixteen: halves of two are put side by side and added, four times. */
#define AT(p, h) ((p) / (h) / 2 * 2 * (h) + (p) % (h) + (p) / (h) % 2 * LANES)
#define HALVES(h) \
  (ivec){AT(0, h), AT(1, h), AT(2, h), AT(3, h), AT(4, h), AT(5, h), AT(6, h), AT(7, h), \
         AT(8, h), AT(9, h), AT(10, h), AT(11, h), AT(12, h), AT(13, h), AT(14, h), AT(15, h)}
#define FOLD(h) \
  for (int i = 0; i < h; i++) \
    x[i] = __builtin_shuffle(x[i], x[i + h], HALVES(h)) + __builtin_shuffle(x[i], x[i + h], HALVES(h) + h);
INLINE vec sums_of(vec *x) {
  FOLD(8) FOLD(4) FOLD(2) FOLD(1)
  return x[0];
}

#ifdef DOUBLE
INLINE vec exp_of(vec x) {
  for (int i = 0; i < LANES; i++) x[i] = exp(x[i]);
  return x;
}
#define exp_below exp_of
#else
#define LEAST SAME(-87.3f) /* below, e^x leaves the ordinary numbers, and is 0 here */
#define MOST SAME(88.7228f)

/* e^x = 2^n e^r, |r| <= ln 2 / 2: n by rounding, e^r by the polynomial of Cephes' expf, 2^n by the bits of the exponent. */
INLINE vec exp_between(vec x) {
  vec shifted = x * 1.44269504088896341f + 12582912.0f; /* 1.5 2^23: the last bits are n */
  vec n = shifted - 12582912.0f, r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = SAME(1.9875691500e-4f) * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return (vec)((ivec)p + ((ivec)shifted << 23));
}
/* Both are NaN of NaN: no comparison with it is true. exp_below: of x <= MOST. */
INLINE vec exp_below(vec x) {
  return pick(x >= LEAST, exp_between(larger(x, LEAST)), pick(x == x, SAME(0), x));
}
INLINE vec exp_of(vec x) {
  vec kept = larger(x, LEAST);
  vec p = pick(x < LEAST, SAME(0), exp_between(pick(kept < MOST, kept, MOST)));
  return pick(x <= MOST, p, x + INFINITY);
}
#endif
