/* Rotating pairs of numbers by an angle: `rotate_by_formula` in rotation.py, in one pass. */
#include <stdint.h>
typedef const float *restrict in;
typedef float *restrict out;

/* Pair k is at a[step k], b[step k]. Products are rounded before they are added, as in the formula. */
static inline __attribute__((always_inline))
void row(in a, in b, in cos, in sin, out u, out v, int64_t pairs, int64_t step) {
  for (int64_t k = 0; k < pairs; k++) {
    float x = a[step * k], y = b[step * k], c = cos[k], s = sin[k];
    u[step * k] = x * c - y * s;
    v[step * k] = x * s + y * c;
  }
}

/* x -> rotated: [B, H, L, 2 pairs] of any strides (last: 1); cos, sin: [L, pairs], for the next row of B `each` numbers later.
   Sixteen tokens of all heads at once: their angles stay in cache. */
void rotate(in x, in cos, in sin, out rotated, int64_t B, int64_t H, int64_t L, int64_t pairs, int64_t xb, int64_t xh,
            int64_t xl, int64_t rb, int64_t rh, int64_t rl, int64_t each, int half, int threads) {
  int64_t blocks = (L + 15) / 16;
  #pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < B * blocks; i++) {
    int64_t b = i / blocks, first = i % blocks * 16, last = first + 16 < L ? first + 16 : L;
    for (int64_t h = 0; h < H; h++)
      for (int64_t l = first; l < last; l++) {
        const float *p = x + b * xb + h * xh + l * xl;
        float *q = rotated + b * rb + h * rh + l * rl;
        int64_t at = b * each + l * pairs;
        if (half) row(p, p + pairs, cos + at, sin + at, q, q + pairs, pairs, 1);
        else row(p, p + 1, cos + at, sin + at, q, q + 1, pairs, 2);
      }
  }
}
