/* A few queries against many keys: each number of keys and values is read once, in place. As band.c otherwise. */
#include "vectors.h"

#define SOME 64 /* keys at once: they stay in the cache until every query of their head has read them */

/* to[:] += sum over n rows of weights[i] * x[i][:], `across` vectors of a row at once. */
INLINE num add_vectors(const int across, num n, const real *weights, const store *x, num row, num d, num dim, real *to) {
  for (; d + across * WIDE <= dim; d += across * WIDE) {
    vec sum[ACROSS];
#pragma GCC unroll 4
    for (int v = 0; v < across; v++) sum[v] = SAME(0);
    for (num i = 0; i < n; i++)
#pragma GCC unroll 4
      for (int v = 0; v < across; v++) sum[v] += weights[i] * load(x + i * row + d + v * WIDE);
    for (int v = 0; v < across; v++) *(vec *)(to + d + v * WIDE) += sum[v];
  }
  return d;
}

INLINE void add(num n, const real *weights, const store *x, num row, num dim, real *to) {
  num d = add_vectors(ACROSS, n, weights, x, row, 0, dim, to);
  d = add_vectors(1, n, weights, x, row, d, dim, to);
  for (; d < dim; d++)
    for (num i = 0; i < n; i++) to[d] += weights[i] * widen(x[i * row + d]);
}

num decode_space(const Shape *s) { return s->groups * s->most_queries * (s->dim + s->value_dim + 2) + up(SOME, WIDE); }

/* lse [B, H, Lq] and ends [2, B, H, Lq] as in band.c, or neither. A task is a span and a head of keys. */
typedef struct { const Shape *s; In q, k, v; const real *table; num table_row; Out out; real *lse, *ends, *space; } Decode;
static void decode_task(const void *call, num task, int worker) {
  const Decode *all = call;
  const Shape *s = all->s;
  In q = all->q, k = all->k, v = all->v;
  Out out = all->out;
  num shared = s->heads / s->groups, dim = s->dim, value_dim = s->value_dim;
  num h = task % shared;
  Span p = s->spans[task / shared];
  num rows = (p.q_to - p.q_from) * s->groups;
  real *made = all->space + worker * decode_space(s), *queries = made + rows * value_dim, *top = queries + rows * dim;
  real *total = top + rows, *tile = total + rows;
  memset(made, 0, rows * value_dim * sizeof(real));
  for (num r = 0; r < rows; r++) {
    const store *x = q.at + p.batch * q.batch + (h * s->groups + r % s->groups) * q.head + (p.q_from + r / s->groups) * q.row;
    for (num d = 0; d < dim; d++) queries[r * dim + d] = widen(x[d]) * (real)s->scale * LOG2E;
    top[r] = LOWEST, total[r] = 0;
  }
  const store *keys = k.at + p.batch * k.batch + h * k.head, *values = v.at + p.batch * v.batch + h * v.head;
  for (num b = p.k_from; b < p.k_to; b += SOME)
    for (num r = 0; r < rows; r++) {
      num start = s->queries - 1 - (p.q_from + r / s->groups); /* the diagonal of key 0 */
      num from = most(b, s->first - start), to = least(least(b + SOME, p.k_to), s->last - start + 1);
      if (from >= to) continue;
      const real *biases = all->table ? all->table + (h * s->groups + r % s->groups) * all->table_row + start : 0;
      num row = p.batch * s->heads + h * s->groups + r % s->groups;
      const double *level = s->q_levels ? s->q_levels + row * s->queries + p.q_from + r / s->groups : 0;
      for (num i = from; i < to; i++)
        tile[i - from] = dot(queries + r * dim, keys + i * k.row, dim) + (biases ? biases[i] * LOG2E : 0) +
                         (level ? (real)((*level - s->k_levels[row * s->keys + i]) * LOG2E) : 0);
      for (num i = to; i < from + up(to - from, WIDE); i++) tile[i - from] = -INFINITY;
      vec *x = (vec *)tile, high = x[0], sum = SAME(0);
      num wide = up(to - from, WIDE) / WIDE;
      for (num w = 1; w < wide; w++) high = larger(x[w], high);
      real now = highest_of(high);
      if (now > top[r]) {
        real factor = power(SAME(top[r] - now))[0];
        for (num d = 0; d < value_dim; d++) made[r * value_dim + d] *= factor;
        total[r] *= factor;
        top[r] = now;
      }
      for (num w = 0; w < wide; w++) sum += x[w] = power(x[w] - top[r]);
      total[r] += sum_of(sum);
      add(to - from, tile, values + from * v.row, v.row, value_dim, made + r * value_dim);
    }
  for (num r = 0; r < rows; r++) {
    num g = h * s->groups + r % s->groups, a = p.q_from + r / s->groups, start = s->queries - 1 - a;
    int has_keys = most(p.k_from, s->first - start) < least(p.k_to, s->last - start + 1);
    store *to = out.at + p.batch * out.batch + g * out.head + a * out.row;
    for (num d = 0; d < value_dim; d++) to[d] = narrow(has_keys ? made[r * value_dim + d] / total[r] : 0);
    if (!all->lse) continue;
    num at = (p.batch * s->heads + g) * s->queries + a;
    all->ends[at] = has_keys ? top[r] : INFINITY;
    all->ends[at + s->batch * s->heads * s->queries] = has_keys ? (real)log2(total[r]) : 0;
    all->lse[at] = !has_keys ? -INFINITY : total[r] == 0 ? NAN : (top[r] + (real)log2(total[r])) / LOG2E;
  }
}

void decode(const Shape *s, In q, In k, In v, const real *table, num table_row, Out out, real *lse, real *ends, real *space) {
  Decode all = {s, q, k, v, table, table_row, out, lse, ends, space};
  in_parallel(decode_task, &all, s->count * (s->heads / s->groups), 0, s->threads);
}
