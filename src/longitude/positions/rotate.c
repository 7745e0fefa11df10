/* Rotating pairs of numbers by an angle: `rotate_by_formula` in rotation.py, in one pass. */
#include <stdint.h>
#include <string.h>
#include "parallel.h"
typedef int64_t num;
#define INLINE static inline __attribute__((always_inline))

/* ---- numbers in memory and as float; narrow ones are rounded to the nearest, ties to even ---- */
INLINE uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
INLINE float of_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

#if defined(BFLOAT16)
typedef uint16_t number;
INLINE float wide(number x) { return of_bits((uint32_t)x << 16); }
INLINE number narrow(float x) {
  uint32_t bits = bits_of(x);
  return (x == x ? bits + 0x7fff + (bits >> 16 & 1) : 0x7fc00000) >> 16;
}
#elif defined(FLOAT16) /* in operations that vectors have on every processor */
typedef uint16_t number;
INLINE float wide(number x) {
  uint32_t rest = x & 0x7fff, bits = bits_of(of_bits(rest << 13) * 0x1p112f);
  return of_bits(bits | (rest >= 0x7c00 ? 0x7f800000 : 0) | (uint32_t)(x & 0x8000) << 16);
}
INLINE number narrow(float x) {
  uint32_t bits = bits_of(x), rest = bits & 0x7fffffff;
  uint32_t usual = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
  uint32_t tiny = bits_of(of_bits(rest) + 0.5f) - 0x3f000000; /* below 2^-14, where the steps are even */
  uint32_t huge = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
  return (rest < 0x38800000 ? tiny : rest < 0x47800000 ? usual : huge) | bits >> 31 << 15;
}
#else
typedef float number;
INLINE float wide(number x) { return x; }
INLINE number narrow(float x) { return x; }
#endif

/* ---- one head of one token: pair k is at x[step k], x[step k + other]. Products are rounded before they are added, as in the
   formula. ---- */
INLINE void row(const number *restrict x, const float *restrict cos, const float *restrict sin, number *restrict out, num pairs,
                num step, num other) {
  for (num k = 0; k < pairs; k++) {
    float a = wide(x[step * k]), b = wide(x[step * k + other]), c = cos[k], s = sin[k];
    out[step * k] = narrow(a * c - b * s);
    out[step * k + other] = narrow(a * s + b * c);
  }
}

/* ---- tensors of the same tokens, [B, heads, L, 2 pairs + rest] of any strides (last: 1). cos, sin: [L, pairs]; the table of
   the next row of B begins `each` numbers later. The rest is copied. ---- */
typedef struct { const number *x; number *out; num heads, rest, xb, xh, xl, ob, oh, ol; } Heads;
typedef struct { const float *cos, *sin; num B, L, pairs, each, half, threads, count; Heads tensors[]; } Call;

/* Tokens first .. last - 1 of heads h .. end - 1. Four heads of a token at a time where heads lie far apart: the processor then
   reads and writes a few long streams, and the angles are read a quarter as often. */
static void block(const Call *call, const Heads *t, num b, num h, num end, num first, num last) {
  num pairs = call->pairs;
  for (num l = first; l < last; l++)
    for (num i = h; i < end; i++) {
      const number *x = t->x + b * t->xb + i * t->xh + l * t->xl;
      number *out = t->out + b * t->ob + i * t->oh + l * t->ol;
      const float *cos = call->cos + b * call->each + l * pairs, *sin = call->sin + b * call->each + l * pairs;
      if (call->half) row(x, cos, sin, out, pairs, 1, pairs);
      else row(x, cos, sin, out, pairs, 2, 1);
      if (t->rest) memcpy(out + 2 * pairs, x + 2 * pairs, t->rest * sizeof(number));
    }
}

enum { TOKENS = 128 };
INLINE num together(const Heads *t) { return t->heads && t->xh < t->xl ? t->heads : 4; }
INLINE num blocks_of(const Call *call, const Heads *t) {
  return call->B * ((call->L + TOKENS - 1) / TOKENS) * ((t->heads + together(t) - 1) / together(t));
}

/* The i-th block of all tensors. */
static void rotate_block(const void *of, num i, int worker) {
  const Call *call = of;
  const Heads *t = call->tensors;
  for (; i >= blocks_of(call, t); t++) i -= blocks_of(call, t);
  num blocks = (call->L + TOKENS - 1) / TOKENS, groups = (t->heads + together(t) - 1) / together(t);
  num b = i / (groups * blocks), h = i / blocks % groups * together(t), first = i % blocks * TOKENS;
  num end = h + together(t) < t->heads ? h + together(t) : t->heads;
  num last = first + TOKENS < call->L ? first + TOKENS : call->L;
  block(call, t, b, h, end, first, last);
}

void rotate(const Call *call) {
  num count = 0;
  for (num n = 0; n < call->count; n++) count += blocks_of(call, call->tensors + n);
  in_parallel(rotate_block, call, count, 4 * call->threads, call->threads);
}
