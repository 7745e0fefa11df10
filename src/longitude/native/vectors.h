/* What the C kernels share: vectors, their products, and the sizes of a call. */
#pragma once
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "parallel.h"

#ifdef DOUBLE
typedef double real;
typedef int64_t bits;
#define REAL_BITS 64
#define LOWEST (-DBL_MAX) /* no score that is not -inf is lower */
#else
typedef float real;
typedef int32_t bits;
#define REAL_BITS 32
#define LOWEST (-FLT_MAX)
#endif

#if defined(__AVX512F__)
#define VECTOR_BITS 512
#elif defined(__AVX__)
#define VECTOR_BITS 256
#else
#define VECTOR_BITS 128
#endif
#define WIDE (VECTOR_BITS / REAL_BITS) /* numbers in a vector */
#if defined(__AVX512F__) || defined(__aarch64__)
#define ACROSS 4 /* vectors side by side: with ROWS of them, as many sums as there are registers */
#else
#define ACROSS 2
#endif
#define ROWS 6                   /* queries whose sums stay in registers */
#define PANEL (2048 / REAL_BITS) /* keys at once, whatever the width of a vector */
#define VECTORS (PANEL / WIDE)   /* of them */
#define LOG2E ((real)1.4426950408889634)
#define INLINE static inline __attribute__((always_inline))

typedef real vec __attribute__((vector_size(VECTOR_BITS / 8), aligned(REAL_BITS / 8), may_alias));
typedef bits ivec __attribute__((vector_size(VECTOR_BITS / 8), aligned(REAL_BITS / 8), may_alias));
typedef int64_t num;
#ifdef BFLOAT16 /* inputs and outputs; all that is between them is float */
typedef uint16_t store;
typedef uint16_t halves __attribute__((vector_size(VECTOR_BITS / 16), aligned(2), may_alias));
#else
typedef real store;
#endif
typedef struct { const store *at; num batch, head, row; } In; /* [B, H, L, D], strides in numbers, that of D is 1 */
typedef struct { store *at; num batch, head, row, split; } Out;

/* Where the numbers are, and how many. A span: queries q_from .. q_to - 1 of a row of the batch, which attend only to the keys
   k_from .. k_to - 1 of that row. */
typedef struct { num batch, q_from, q_to, k_from, k_to; } Span;
typedef struct { const real *at; real *grad; num head, count; } Vectors; /* [H or 1, count, D], [splits * shares, H, count, D] */
typedef struct {
  num batch, heads, groups, queries, keys, dim, value_dim, first, last; /* groups: queries' heads to a head of keys */
  num count, most_queries, most_keys;                                   /* of the spans */
  num splits, shares;                                                   /* of the blocks of queries in a span, of the spans */
  double scale;
  const Span *spans;
  const real *logits; /* [B, H, Lq, columns] of counted keys; null: none are counted */
  real *grad_logits;
  num columns;
  const real *curves, *rates; /* [H, 3, pieces] and [B, Lq] of curved.h, whose distances are the table; null: there is no curve */
  real *grad_curves, *grad_rates; /* [splits * shares, H, 3, pieces], [B, H, Lq] */
  num pieces;
  const double *q_levels, *k_levels; /* [B, H, Lq] and [B, H, Lk] of a forget gate, level_a - level_b is added; null: there are none */
  double *grad_q_levels, *grad_k_levels; /* [B, H, Lq], [splits, B, H, Lk] */
  Vectors key_vectors, value_vectors; /* of skewed.h, of the diagonals from `near` on; null: there are none */
  num near;
  int threads;
} Shape;

INLINE num least(num a, num b) { return a < b ? a : b; }
INLINE num most(num a, num b) { return a > b ? a : b; }
INLINE num up(num n, num step) { return (n + step - 1) / step * step; }

/* ---- vectors ---- */
#define SAME(x) ((vec)((vec){0} + (real)(x)))
#if WIDE == 16
#define LANE ((ivec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif WIDE == 8
#define LANE ((ivec){0, 1, 2, 3, 4, 5, 6, 7})
#elif WIDE == 4
#define LANE ((ivec){0, 1, 2, 3})
#else
#define LANE ((ivec){0, 1})
#endif

/* A number, or a vector of them, from where it is stored; and back, to the nearest. */
#ifdef BFLOAT16
typedef union { float number; uint32_t as; } Bits;
INLINE real widen(store x) { return ((Bits){.as = (uint32_t)x << 16}).number; }
INLINE vec load(const store *x) { return (vec)(__builtin_convertvector(*(const halves *)x, ivec) << 16); }
INLINE store narrow(real x) {
  uint32_t as = ((Bits){.number = x}).as;
  return (store)(x != x ? as >> 16 | 64 : (as + 0x7fff + (as >> 16 & 1)) >> 16);
}
#else
INLINE real widen(store x) { return x; }
INLINE vec load(const store *x) { return *(const vec *)x; }
INLINE store narrow(real x) { return x; }
#endif

INLINE vec larger(vec a, vec b) { /* b where either is NaN */
  ivec which = a > b;
  return (vec)((which & (ivec)a) | (~which & (ivec)b));
}

INLINE real highest_of(vec x) {
  for (int half = WIDE / 2; half; half /= 2) x = larger(x, __builtin_shuffle(x, LANE ^ half));
  return x[0];
}

INLINE real sum_of(vec x) {
  for (int half = WIDE / 2; half; half /= 2) x += __builtin_shuffle(x, LANE ^ half);
  return x[0];
}

INLINE int any_of(ivec x) {
  for (int half = WIDE / 2; half; half /= 2) x |= __builtin_shuffle(x, LANE ^ half);
  return x[0] != 0;
}

/* a . b */
INLINE real dot(const real *a, const store *b, num dim) {
  vec sum = SAME(0);
  num d = 0;
  for (; d + WIDE <= dim; d += WIDE) sum += *(const vec *)(a + d) * load(b + d);
  real rest = 0;
  for (; d < dim; d++) rest += a[d] * widen(b[d]);
  return sum_of(sum) + rest;
}

/* 2^-UNDERFLOW_EXPONENT of the largest weight changes no sum, and sums of much less would be denormal numbers, which are many
   times as slow. */
#define UNDERFLOW_EXPONENT (REAL_BITS == 32 ? 100 : 1000)
#ifndef NEGLIGIBLE
#define NEGLIGIBLE UNDERFLOW_EXPONENT /* `power` makes 0 of what is that much lower: leaving it out changes no bit */
#endif

/* WIDE vectors, x[i][j] -> x[j][i]. */
INLINE void transpose(vec *x) {
  for (int half = WIDE / 2; half; half /= 2) {
    ivec odd = (LANE & half) != 0, a = (odd & (LANE - half + WIDE)) | (~odd & LANE), b = a + half;
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++)
      if (!(i & half)) {
        vec near = x[i], far = x[i + half];
        x[i] = __builtin_shuffle(near, far, a);
        x[i + half] = __builtin_shuffle(near, far, b);
      }
  }
}

/* 2^x = 2^whole 2^rest; 0 where x < -UNDERFLOW_EXPONENT, NaN of NaN. The polynomial is right to 8e-8, for double to 1e-16. */
INLINE vec power(vec x) {
#ifdef DOUBLE
  static const real c[] = {1.3691488853904128e-12, 2.5678435993488202e-11, 4.44553827187081e-10, 7.054911620801123e-09,
                           1.0178086009239699e-07, 1.3215486790144307e-06, 1.5252733804059841e-05, 1.5403530393381608e-04,
                           1.333355814642844e-03,  9.618129107628477e-03,  5.550410866482158e-02,  2.402265069591007e-01,
                           6.931471805599453e-01,  1};
  const real round = 6755399441055744.0; /* 1.5 2^52: what is added to it loses its fraction */
  const int mantissa = 52, bias = 1023;
#else
  static const real c[] = {1.3276489593740488e-3f, 9.675541634742987e-3f, 5.550713229265456e-2f,
                           2.4022119721828453e-1f, 6.931469670715228e-1f, 1};
  const real round = 12582912; /* 1.5 2^23 */
  const int mantissa = 23, bias = 127;
#endif
  ivec dead = x < -UNDERFLOW_EXPONENT;
  x = (vec)((dead & (ivec)SAME(-bias)) | (~dead & (ivec)x));
  vec whole = x + round, rest = x - (whole - round), y = SAME(c[0]);
  union { real number; bits as; } zero = {round};
  ivec two = (ivec)whole - (zero.as - bias);
#pragma GCC unroll 16
  for (int i = 1; i < (int)(sizeof c / sizeof *c); i++) y = y * rest + c[i];
  return y * (vec)(two << mantissa);
}

/* c[r][:] = start[r][:] + sum over k of a[r row + k col] b[k][:] for `rows` rows of `wide` vectors, known when compiled. */
INLINE void sums(const int rows, const int wide, num n, const real *a, num row, num col, const real *b, num next,
                 const real *start, num first, real *c, num stride) {
  vec sum[ROWS][ACROSS], other[ACROSS];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < wide; v++) sum[r][v] = SAME(0);
  for (num k = 0; k < n; k++) {
#pragma GCC unroll 4
    for (int v = 0; v < wide; v++) other[v] = *(const vec *)(b + k * next + v * WIDE);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      real x = a[r * row + k * col];
#pragma GCC unroll 4
      for (int v = 0; v < wide; v++) sum[r][v] += x * other[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < wide; v++) {
      if (start) sum[r][v] += *(const vec *)(start + r * first + v * WIDE); /* last: a large number would cost the sum digits */
      *(vec *)(c + r * stride + v * WIDE) = sum[r][v];
    }
}

/* The same for any number of vectors, ACROSS at a time, and for ROWS or what they leave of a PANEL. */
#define WITH n, a, row, col, b, next, start, first, c, stride
#define SUMS(rows)                                                           \
  (wide >= ACROSS ? sums(rows, ACROSS, WITH) : wide == 1 ? sums(rows, 1, WITH) \
   : wide == 2 ? sums(rows, 2, WITH) : sums(rows, ACROSS - 1, WITH))
static void product(int rows, int wide, num n, const real *a, num row, num col, const real *b, num next, const real *start,
                    num first, real *c, num stride) {
  for (; wide > 0; wide -= ACROSS, b += ACROSS * WIDE, c += ACROSS * WIDE, start = start ? start + ACROSS * WIDE : 0)
    if (rows == ROWS) SUMS(ROWS);
    else SUMS(PANEL % ROWS);
}

/* c[r][:] += sum over k of a[r row + k col] b[k][:], rows of b and c `dim` wide. */
INLINE void gather(int rows, num dim, num n, const real *a, num row, num col, const real *b, real *c) {
  for (num x = 0; x < dim; x += PANEL)
    product(rows, (int)(least(dim - x, PANEL) / WIDE), n, a, row, col, b + x, dim, c + x, dim, c + x, dim);
}

/* The same for the keys that are the columns of a [n, PANEL], `next` numbers from row to row: those from low to high - 1, at least. */
INLINE void scatter(num dim, num low, num high, num n, const real *a, num next, const real *b, real *c) {
  for (num r = low / ROWS * ROWS; r < high; r += ROWS)
    gather(r + ROWS <= PANEL ? ROWS : PANEL % ROWS, dim, n, a + r, 1, next, b, c + r * dim);
}
