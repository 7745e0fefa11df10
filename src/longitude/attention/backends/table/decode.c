/* A few queries against many keys: each number of keys and values is read once, in place. As band.c otherwise. */
#include "vectors.h"

#define SOME 64 /* keys at once: they stay in the cache until every query of their head has read them */

INLINE real dot(const real *a, const real *b, num dim) {
  vec sum = SAME(0);
  num d = 0;
  for (; d + WIDE <= dim; d += WIDE) sum += *(const vec *)(a + d) * *(const vec *)(b + d);
  real rest = 0;
  for (; d < dim; d++) rest += a[d] * b[d];
  return sum_of(sum) + rest;
}

/* to[:] += sum over n rows of weights[i] * x[i][:] */
INLINE void add(num n, const real *weights, const real *x, num row, num dim, real *to) {
  num d = 0;
  for (; d + PANEL <= dim; d += PANEL) sums(1, ACROSS, n, weights, 0, 1, x + d, row, to + d, 0, to + d, 0);
  for (; d + WIDE <= dim; d += WIDE) sums(1, 1, n, weights, 0, 1, x + d, row, to + d, 0, to + d, 0);
  for (; d < dim; d++)
    for (num i = 0; i < n; i++) to[d] += weights[i] * x[i * row + d];
}

num decode_space(const Shape *s) { return s->groups * s->most_queries * (2 * s->dim + 2) + up(SOME, WIDE); }

/* lse [B, H, Lq] and ends [2, B, H, Lq] as in band.c. A task is a span and a head of keys. */
void decode(const Shape *s, In q, In k, In v, const real *table, num table_row, Out out, real *lse, real *ends,
            real *space) {
  num shared = s->heads / s->groups, dim = s->dim;
#pragma omp parallel for schedule(dynamic, 1) num_threads(s->threads)
  for (num task = 0; task < s->count * shared; task++) {
    num h = task % shared;
    Span p = s->spans[task / shared];
    num rows = (p.q_to - p.q_from) * s->groups;
    real *made = space + omp_get_thread_num() * decode_space(s), *queries = made + rows * dim, *top = queries + rows * dim;
    real *total = top + rows, *tile = total + rows;
    memset(made, 0, rows * dim * sizeof(real));
    for (num r = 0; r < rows; r++) {
      const real *x = q.at + p.batch * q.batch + (h * s->groups + r % s->groups) * q.head + (p.q_from + r / s->groups) * q.row;
      for (num d = 0; d < dim; d++) queries[r * dim + d] = x[d] * (real)s->scale * LOG2E;
      top[r] = LOWEST, total[r] = 0;
    }
    const real *keys = k.at + p.batch * k.batch + h * k.head, *values = v.at + p.batch * v.batch + h * v.head;
    for (num b = p.k_from; b < p.k_to; b += SOME)
      for (num r = 0; r < rows; r++) {
        num start = s->queries - 1 - (p.q_from + r / s->groups); /* the diagonal of key 0 */
        num from = most(b, s->first - start), to = least(least(b + SOME, p.k_to), s->last - start + 1);
        if (from >= to) continue;
        const real *biases = table ? table + (h * s->groups + r % s->groups) * table_row + start : 0;
        for (num i = from; i < to; i++)
          tile[i - from] = dot(queries + r * dim, keys + i * k.row, dim) + (biases ? biases[i] * LOG2E : 0);
        for (num i = to; i < from + up(to - from, WIDE); i++) tile[i - from] = -INFINITY;
        vec *x = (vec *)tile, high = x[0], sum = SAME(0);
        num wide = up(to - from, WIDE) / WIDE;
        for (num w = 1; w < wide; w++) high = larger(x[w], high);
        real now = highest_of(high);
        if (now > top[r]) {
          real factor = power(SAME(top[r] - now))[0];
          for (num d = 0; d < dim; d++) made[r * dim + d] *= factor;
          total[r] *= factor;
          top[r] = now;
        }
        for (num w = 0; w < wide; w++) sum += x[w] = power(x[w] - top[r]);
        total[r] += sum_of(sum);
        add(to - from, tile, values + from * v.row, v.row, dim, made + r * dim);
      }
    for (num r = 0; r < rows; r++) {
      num g = h * s->groups + r % s->groups, a = p.q_from + r / s->groups, start = s->queries - 1 - a;
      int has_keys = most(p.k_from, s->first - start) < least(p.k_to, s->last - start + 1);
      real *to = out.at + p.batch * out.batch + g * out.head + a * out.row;
      for (num d = 0; d < dim; d++) to[d] = has_keys ? made[r * dim + d] / total[r] : 0;
      num at = (p.batch * s->heads + g) * s->queries + a;
      ends[at] = has_keys ? top[r] : INFINITY;
      ends[at + s->batch * s->heads * s->queries] = has_keys ? (real)log2(total[r]) : 0;
      lse[at] = !has_keys ? -INFINITY : total[r] == 0 ? NAN : (top[r] + (real)log2(total[r])) / LOG2E;
    }
  }
}
