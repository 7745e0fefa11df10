/* Attention along diagonals, in one pass: biases by a table of offsets, a curve of it, counted keys, levels, and vectors of offsets.

   A block of queries loops over the panels of keys; a tile of scores is computed, made into weights and used while
   it is in the cache's first level or in registers. Queries are not reversed here: query a and key b meet at diagonal
   n = queries - 1 - a + b, allowed from `first` to `last`. Scores are in base 2. */
#include "skewed.h"

/* ---- a head's numbers, side by side ---- */

/* Keys x [keys, dim] -> [panels, padded, PANEL], and the length of the longest key of each panel, NaN where one is not finite. */
static void lay_across(const store *x, num row, num keys, num dim, num padded, real *to, real *longest) {
  for (num b = 0; b < up(keys, PANEL); b += WIDE) {
    real *across = to + b / PANEL * padded * PANEL + b % PANEL, *length = longest + b / PANEL;
    vec square = SAME(0);
    num done = b + WIDE <= keys ? dim / WIDE * WIDE : 0;
    for (num d = 0; d < done; d += WIDE) {
      vec some[WIDE];
      for (num i = 0; i < WIDE; i++) some[i] = load(x + (b + i) * row + d);
      transpose(some);
      for (num i = 0; i < WIDE; i++) *(vec *)(across + (d + i) * PANEL) = some[i];
    }
    for (num i = 0; i < WIDE && done < padded; i++)
      for (num d = done; d < padded; d++) across[d * PANEL + i] = b + i < keys && d < dim ? widen(x[(b + i) * row + d]) : 0;
    for (num d = 0; d < padded; d++) square += *(vec *)(across + d * PANEL) * *(vec *)(across + d * PANEL);
    real here = (real)sqrt(highest_of(square)) + 0 * sum_of(square);
    if (b % PANEL == 0 || here > *length || here != here) *length = here;
  }
}

/* x [count, dim] times factor -> [rows, padded], with zeros; the length of the longest row. */
static real lay_down(const store *x, num row, num count, num rows, num dim, num padded, real factor, real *to) {
  real longest = 0;
  for (num r = 0; r < rows; r++, to += padded) {
    num some = r < count ? dim : 0;
    vec square = SAME(0);
    for (num d = 0; d < some; d++) to[d] = widen(x[r * row + d]) * factor;
    for (num d = some; d < padded; d++) to[d] = 0;
    for (num d = 0; d < padded; d += WIDE) square += *(vec *)(to + d) * *(vec *)(to + d);
    real here = sum_of(square);
    longest = here > longest || here != here ? here : longest;
  }
  return (real)sqrt(longest);
}

/* The table of a head (null: zeros) in base 2, -inf outside the band, MARGIN more on both sides; the highest of each PANEL. */
static void tabulate(const Shape *s, const real *table, real *to, real *highest) {
  num length = up(s->queries + s->keys - 1 + 2 * MARGIN, PANEL);
  for (num n = -MARGIN; n < length - MARGIN; n++)
    to[n + MARGIN] = n < s->first || n > s->last ? -INFINITY : table ? table[n] * LOG2E : 0;
  for (num p = 0; p < length; p += PANEL) {
    real high = -INFINITY;
    for (num i = 0; i < PANEL; i++) high = to[p + i] > high || to[p + i] != to[p + i] ? to[p + i] : high;
    highest[p / PANEL] = high;
  }
}

/* An upper bound of the biases of ROWS queries from a on and the panel at key b. */
INLINE real highest_bias(const Shape *s, const real *highest, num a, num b) {
  num from = (MARGIN + s->queries - a - ROWS + b) / PANEL, to = (MARGIN + s->queries - 1 - a + b + PANEL - 1) / PANEL;
  real high = highest[from];
  for (num p = from + 1; p <= to; p++) high = highest[p] > high || highest[p] != highest[p] ? highest[p] : high;
  return high;
}

/* The keys low .. high - 1 are those that query a attends to. */
INLINE num low_key(const Shape *s, num a) { return most(0, s->first - (s->queries - 1 - a)); }
INLINE num high_key(const Shape *s, num a) { return least(s->keys, s->last - (s->queries - 1 - a) + 1); }

/* Levels of the queries and keys of a span and head, null without them; and of a tile, in base 2 and relative to its first query, so
   that those of near keys are small numbers. highest: no score is raised by more; NaN if a level is not finite. */
typedef struct { const double *of_queries, *of_keys; real rows[ROWS], columns[PANEL], highest; } Levels;
INLINE Levels levels_of(const Shape *s, Span p, num head) {
  if (!s->q_levels) return (Levels){0};
  num row = p.batch * s->heads + head;
  return (Levels){s->q_levels + row * s->queries + p.q_from, s->k_levels + row * s->keys + p.k_from};
}
static void lay_levels(Levels *l, num a, num rows, num b, num keys) {
  if (!l->of_queries) return;
  double first = l->of_queries[a], high = -INFINITY, high_row = 0, sum = 0;
  for (num r = 0; r < ROWS; r++) {
    double row = r < rows ? (l->of_queries[a + r] - first) * LOG2E : 0;
    high_row = row > high_row ? row : high_row, sum += row, l->rows[r] = (real)row;
  }
  for (num n = 0; n < PANEL; n++) {
    double column = n < keys ? (first - l->of_keys[b + n]) * LOG2E : 0;
    high = column > high ? column : high, sum += column, l->columns[n] = (real)column;
  }
  l->highest = (real)(high + high_row + 0 * sum);
}
/* Adds the gradient y of the scores of a query and `keys` keys to that of their levels. */
INLINE void of_levels(const real *y, num keys, double *of_query, double *of_keys) {
  double sum = 0;
  for (num n = 0; n < keys; n++) sum += y[n], of_keys[n] -= y[n];
  *of_query += sum;
}

/* Scores [ROWS, PANEL] of queries from a on and `wide` vectors of keys from b on; -inf outside the band. bias: of the first,
   `next` numbers from row to row; levels: from column `skip` on. */
INLINE void score(const Shape *s, const real *q, num dim, const real *keys, const real *bias, num next, const Levels *levels, num skip,
                  num a, num b, int wide, int finite, real *to) {
  product(ROWS, wide, dim, q, dim, 1, keys, PANEL, bias, next, to, PANEL);
  for (num r = 0; levels->of_queries && r < ROWS; r++)
    for (num w = 0; w < wide * WIDE; w += WIDE)
      *(vec *)(to + r * PANEL + w) += levels->rows[r] + *(const vec *)(levels->columns + skip + w);
  if (finite && b + wide * WIDE <= s->keys) return; /* the table masks them already */
  for (num r = 0; r < ROWS; r++)                    /* keys beyond the last; and -inf and NaN do not add up to -inf */
    for (num i = 0; i < wide * WIDE; i++)
      if (b + i < low_key(s, a + r) || b + i >= high_key(s, a + r)) to[r * PANEL + i] = -INFINITY;
}
#define FINITE(bound) ((bound) < (real)1e30)

/* Whether all weights of ROWS queries and a panel are 0: |q.k| <= bound, and rounded up for what rounding took from it. */
INLINE int negligible(const Shape *s, real bound, const real *highest, const Levels *levels, num a, num b, const real *top) {
  real lowest = top[0];
  for (int r = 1; r < ROWS; r++) lowest = top[r] < lowest ? top[r] : lowest;
  return bound * (real)1.001 + 1 + highest_bias(s, highest, a, b) + levels->highest < lowest - NEGLIGIBLE;
}

/* A span as a separate call: its diagonal 0 is the diagonal `shift` of the whole. */
INLINE Shape alone(const Shape *s, Span p, num *shift) {
  Shape t = *s;
  t.queries = p.q_to - p.q_from, t.keys = p.k_to - p.k_from;
  *shift = s->queries - p.q_to + p.k_from;
  t.first -= *shift, t.last -= *shift;
  return t;
}

INLINE const store *in(In x, num batch, num head, num row) { return x.at + batch * x.batch + head * x.head + row * x.row; }
INLINE store *out_of(Out x, num batch, num head, num row, num split) {
  return x.at + split * x.split + batch * x.batch + head * x.head + row * x.row;
}

/* What a span needs at most. */
typedef struct { num dim, value_dim, keys, values, panels, table, shared, logits, distances, key_skew, value_skew; } Sizes;
static Sizes sizes(const Shape *s) {
  num dim = up(s->dim, WIDE), value_dim = up(s->value_dim, WIDE), keys = up(s->most_keys, PANEL);
  num table = up(s->most_queries + s->most_keys - 1 + 2 * MARGIN, PANEL);
  return (Sizes){dim, value_dim, keys * dim, keys * value_dim, keys / PANEL, table, s->heads / s->groups,
                 s->logits ? s->columns + 1 : 0, s->curves ? table : 0, skew_space(&s->key_vectors, dim),
                 skew_space(&s->value_vectors, value_dim)};
}

/* The logits of `rows` queries, as counted.h reads them, BLOCK of them. */
static void lay_logits(const Shape *s, num at, num rows, real *to) {
  memset(to, 0, BLOCK * (s->columns + 1) * sizeof(real));
  for (num r = 0; r < rows; r++, to += s->columns + 1)
    for (num c = 0; c <= s->columns; c++) to[c] = s->logits[(at + r) * s->columns + least(c, s->columns - 1)] * LOG2E;
}

/* ---- forward ---- */

/* Numbers of working space that each thread needs. */
num forward_space(const Shape *s) {
  Sizes n = sizes(s);
  return n.keys + n.values + n.panels + 2 * n.table + BLOCK * (n.dim + n.value_dim) + ROWS * PANEL + 3 * BLOCK +
         BLOCK * n.logits + n.distances + n.key_skew + n.value_skew;
}

/* Scores x [ROWS, PANEL] -> weights 2^(score - top), added to `sums`. A top that one exceeds rises by SLACK more than it must, so
   that few exceed it again: then one look at all of them is enough. A score that is not a number raises nothing. */
#define SLACK 8
INLINE void weigh(num dim, int wide, real *x, real *top, vec *sums, real *made, real *apart) {
  ivec above = {0};
  for (int r = 0; r < ROWS; r++)
    for (int w = 0; w < wide; w++) above |= *(vec *)(x + r * PANEL + w * WIDE) > top[r];
  for (int r = 0; r < ROWS && any_of(above); r++) {
    vec high = SAME(LOWEST);
    for (int w = 0; w < wide; w++) high = larger(*(vec *)(x + r * PANEL + w * WIDE), high);
    real now = highest_of(high), before = top[r];
    if (!(now > before)) continue;
    top[r] = now + SLACK;
    vec factor = power(SAME(before - top[r]));
    for (num d = 0; d < dim; d += WIDE) *(vec *)(made + r * dim + d) *= factor;
    for (num d = 0; apart && d < WINDOW; d += WIDE) *(vec *)(apart + r * WINDOW + d) *= factor;
    sums[r] *= factor;
  }
  for (int r = 0; r < ROWS; r++)
    for (int w = 0; w < wide; w++) {
      vec *score = (vec *)(x + r * PANEL + w * WIDE);
      sums[r] += *score = power(*score - top[r]);
    }
}

/* lse [B, H, Lq]; ends [2, B, H, Lq], the same in base 2 and in two parts, the highest score and what the others add: backward
   then makes the same weights, however large scores are. A task is a span, a head of keys, a share of the blocks of queries. */
typedef struct { const Shape *s; In q, k, v; const real *table; num table_row; Out out; real *lse, *ends, *space; } Forward;
static void forward_task(const void *call, num task, int worker) {
  const Forward *all = call;
  const Shape *s = all->s;
  Sizes size = sizes(s);
  In q = all->q, k = all->k, v = all->v;
  num dim = size.dim, value_dim = size.value_dim;
  num h = task / s->splits % size.shared, shift;
  Span p = s->spans[task / s->splits / size.shared];
  Shape t = alone(s, p, &shift);
  num blocks = (t.queries + BLOCK - 1) / BLOCK;
  real *keys = all->space + worker * forward_space(s), *values = keys + size.keys, *longest = values + size.values;
  real *biases = longest + size.panels, *highest = biases + size.table, *queries = highest + size.table;
  real *made = queries + BLOCK * dim, *tile = made + BLOCK * value_dim, *top = tile + ROWS * PANEL, *counts = top + BLOCK;
  real *logits = counts + BLOCK, *distances = logits + BLOCK * size.logits, full = s->columns - 1;
  real *skews = distances + size.distances;
  lay_across(in(k, p.batch, h, p.k_from), k.row, t.keys, s->dim, dim, keys, longest);
  for (num b = 0; b < t.keys; b += PANEL) { /* 0 times what is not finite is not 0: then nothing is left out */
    const store *from_v = in(v, p.batch, h, p.k_from + b);
    longest[b / PANEL] += 0 * lay_down(from_v, v.row, least(t.keys - b, PANEL), PANEL, s->value_dim, value_dim, 1, values + b * value_dim);
  }
  for (num g = h * s->groups; g < (h + 1) * s->groups; g++) {
    const real *offsets = all->table ? all->table + g * all->table_row + shift : 0;
    Curve curve = curve_of(s, g);
    num nearest = s->curves ? lay_distances(offsets, t.queries + t.keys - 1, MARGIN, size.table, distances) : 0;
    tabulate(&t, s->curves ? 0 : offsets, biases, highest);
    Skew of_keys = lay_vectors(s, &s->key_vectors, g, s->dim, dim, skews);
    Skew of_values = lay_vectors(s, &s->value_vectors, g, s->value_dim, value_dim, skews + size.key_skew);
    Levels levels = levels_of(s, p, g);
    for (num n = task % s->splits; n < blocks; n += s->splits) {
      num a = (blocks - 1 - n) * BLOCK, rows = least(BLOCK, t.queries - a); /* the longest rows first */
      const store *from_q = in(q, p.batch, g, p.q_from + a);
      real length = lay_down(from_q, q.row, rows, BLOCK, s->dim, dim, (real)s->scale * LOG2E, queries);
      memset(made, 0, BLOCK * value_dim * sizeof(real));
      Pieces pieces[BLOCK] = {0};
      vec sums[BLOCK] = {0};
      for (num r = 0; r < BLOCK; r++) top[r] = r < rows ? LOWEST : INFINITY, counts[r] = 0;
      if (s->logits) lay_logits(s, (p.batch * s->heads + g) * s->queries + p.q_from + a, rows, logits);
      num low = low_key(&t, a), high = high_key(&t, a + rows - 1);
      for (num b = up(high, PANEL) - PANEL; b >= 0 && b + PANEL > low && high > low; b -= PANEL) { /* near keys first */
        real bound = length * (longest[b / PANEL] + of_keys.longest);
        num corner = MARGIN + t.queries - a - BLOCK + b, panel = corner / PANEL, in_panel = corner % PANEL;
        meet(&of_keys, queries, BLOCK, biases, panel, -1);
        enter(&of_values, panel);
        for (num r = 0; r < rows; r += ROWS) {
          num last = least(r + ROWS, rows), from = most(low_key(&t, a + r) - b, 0);
          num to = least(high_key(&t, a + last - 1) - b, PANEL), skip = from / WIDE * WIDE;
          if (from >= to) continue;
          lay_levels(&levels, a + r, last - r, b, least(PANEL, t.keys - b));
          if (!s->logits && !s->curves && negligible(&t, bound, highest, &levels, a + r, b, top + r)) continue;
          int wide = (int)((to - skip + WIDE - 1) / WIDE);
          num place = in_panel + BLOCK - 1 - r + skip;
          const real *bias = of_keys.here ? of_keys.met + r * WINDOW + place : biases + panel * PANEL + place;
          real *apart = of_values.here ? of_values.apart + r * WINDOW : 0;
          score(&t, queries + r * dim, dim, keys + b * dim + skip, bias, of_keys.here ? WINDOW - 1 : -1, &levels, skip, a + r,
                b + skip, wide, FINITE(bound + levels.highest), tile);
          for (num i = r; i < last; i++) {
            vec *x = (vec *)(tile + (i - r) * PANEL);
            if (s->logits) counts[i] = raise(logits + i * size.logits, full, counts[i], x, wide, 0);
            if (s->curves) {
              num at = MARGIN + t.queries - 1 - a - i + b + skip;
              real rate = s->rates[p.batch * s->queries + p.q_from + a + i];
              pieces[i] = bend(&curve, distances + at, rate, nearest - at, pieces[i], x, wide);
            }
          }
          if (wide == VECTORS) weigh(value_dim, VECTORS, tile, top + r, sums + r, made + r * value_dim, apart);
          else weigh(value_dim, wide, tile, top + r, sums + r, made + r * value_dim, apart);
          gather(ROWS, value_dim, to - from, tile + from - skip, PANEL, 1, values + (b + from) * value_dim, made + r * value_dim);
          for (num i = 0; apart && i < ROWS; i++)
            for (num w = 0; w < wide * WIDE; w += WIDE)
              *(vec *)(apart + i * (WINDOW - 1) + place + w) += *(vec *)(tile + i * PANEL + w);
        }
        if (of_values.here) part(&of_values, BLOCK, panel, -1, made, 0);
      }
      rest(&of_values, BLOCK, -1, made, 0), of_keys.here = 0;
      for (num r = 0; r < rows; r++) {
        store *to = out_of(all->out, p.batch, g, p.q_from + a + r, 0);
        int has_keys = low_key(&t, a + r) < high_key(&t, a + r);
        real total = sum_of(sums[r]);
        for (num d = 0; d < s->value_dim; d++) to[d] = narrow(has_keys ? made[r * value_dim + d] / total : 0);
        num at = (p.batch * s->heads + g) * s->queries + p.q_from + a + r;
        all->ends[at] = has_keys ? top[r] : INFINITY;
        all->ends[at + s->batch * s->heads * s->queries] = has_keys ? (real)log2(total) : 0;
        all->lse[at] = !has_keys ? -INFINITY : total == 0 ? NAN : (top[r] + (real)log2(total)) / LOG2E;
      }
    }
  }
}

void forward(const Shape *s, In q, In k, In v, const real *table, num table_row, Out out, real *lse, real *ends, real *space) {
  Forward all = {s, q, k, v, table, table_row, out, lse, ends, space};
  in_parallel(forward_task, &all, s->count * (s->heads / s->groups) * s->splits, 0, s->threads);
}

/* ---- backward ---- */
num backward_space(const Shape *s) {
  Sizes n = sizes(s);
  return 3 * n.keys + 2 * n.values + 2 * n.panels + 3 * n.table + BLOCK * (2 * n.dim + n.value_dim) + 2 * BLOCK * PANEL + 4 * BLOCK +
         (s->logits ? BLOCK * (2 * n.logits + n.panels) : 0) + n.distances + 2 * s->pieces * WIDE + n.key_skew + n.value_skew;
}

/* ends as forward made them; grad_lse [B, H, Lq] or null: what comes through lse. Adds to grad_table [splits * shares, H, diagonals],
   if there is one. A task is a head of keys, a share of the spans, and a share of the blocks of queries in each. */
typedef struct {
  const Shape *s;
  In grad, q, k, v, out;
  const real *table;
  num table_row;
  const real *ends, *grad_lse;
  Out grad_q, grad_k, grad_v;
  real *grad_table, *space;
} Backward;
static void backward_task(const void *call, num task, int worker) {
  const Backward *all = call;
  const Shape *s = all->s;
  Sizes size = sizes(s);
  In grad = all->grad, q = all->q, k = all->k, v = all->v, out = all->out;
  Out grad_q = all->grad_q, grad_k = all->grad_k, grad_v = all->grad_v;
  const real *grad_lse = all->grad_lse;
  real *grad_table = all->grad_table;
  num dim = size.dim, value_dim = size.value_dim;
  num block = s->last - s->first < 8 * BLOCK ? BLOCK / 2 : BLOCK; /* its queries meet the panels of all: few, where it is narrow */
  num split = task % s->splits, share = task / s->splits % s->shares, h = task / s->splits / s->shares, shift;
  real *keys = all->space + worker * backward_space(s), *values = keys + size.keys, *flat = values + size.values;
  real *made_k = flat + size.keys, *made_v = made_k + size.keys, *longest = made_v + size.values;
  real *biases = longest + 2 * size.panels, *highest = biases + size.table, *made_table = highest + size.table;
  real *queries = made_table + size.table, *grads = queries + BLOCK * dim, *made = grads + BLOCK * value_dim;
  real *weights = made + BLOCK * dim, *slopes = weights + BLOCK * PANEL, *top = slopes + BLOCK * PANEL;
  real *total = top + BLOCK, *delta = total + BLOCK, *run = delta + BLOCK, *logits = run + BLOCK;
  real *of_logits = logits + BLOCK * size.logits, *counts = of_logits + BLOCK * size.logits, full = s->columns - 1;
  real *distances = logits + (s->logits ? BLOCK * (2 * size.logits + size.panels) : 0), *of_curve = distances + size.distances;
  real *skews = of_curve + 2 * s->pieces * WIDE;
  for (num span = share; span < s->count; span += s->shares) {
    Span p = s->spans[span];
    Shape t = alone(s, p, &shift);
    num blocks = (t.queries + block - 1) / block, padded = up(t.keys, PANEL);
    const store *from_k = in(k, p.batch, h, p.k_from), *from_v = in(v, p.batch, h, p.k_from);
    lay_across(from_k, k.row, t.keys, s->dim, dim, keys, longest);
    lay_across(from_v, v.row, t.keys, s->value_dim, value_dim, values, longest + size.panels);
    lay_down(from_k, k.row, t.keys, padded, s->dim, dim, 1, flat);
    for (num b = 0; b < t.keys; b += PANEL) longest[b / PANEL] += 0 * longest[size.panels + b / PANEL];
    memset(made_k, 0, padded * dim * sizeof(real));
    memset(made_v, 0, padded * value_dim * sizeof(real));
    for (num g = h * s->groups; g < (h + 1) * s->groups; g++) {
      const real *offsets = all->table ? all->table + g * all->table_row + shift : 0;
      Curve curve = curve_of(s, g);
      num nearest = s->curves ? lay_distances(offsets, t.queries + t.keys - 1, MARGIN, size.table, distances) : 0;
      num of_head = (split * s->shares + share) * s->heads + g; /* where sums over queries and keys go */
      tabulate(&t, s->curves ? 0 : offsets, biases, highest);
      memset(made_table, 0, size.table * sizeof(real));
      Skew of_keys = lay_vectors(s, &s->key_vectors, g, s->dim, dim, skews);
      Skew of_values = lay_vectors(s, &s->value_vectors, g, s->value_dim, value_dim, skews + size.key_skew);
      Levels levels = levels_of(s, p, g);
      for (num n = split; n < blocks; n += s->splits) {
        num a = n * block, rows = least(block, t.queries - a);
        num at = (p.batch * s->heads + g) * s->queries + p.q_from + a;
        const store *from_q = in(q, p.batch, g, p.q_from + a), *from_grad = in(grad, p.batch, g, p.q_from + a);
        const store *from_out = in(out, p.batch, g, p.q_from + a);
        real length = lay_down(from_q, q.row, rows, block, s->dim, dim, (real)s->scale * LOG2E, queries);
        length += 0 * lay_down(from_grad, grad.row, rows, block, s->value_dim, value_dim, 1, grads);
        memset(made, 0, block * dim * sizeof(real));
        for (num r = 0; r < block; r++) {
          top[r] = r < rows ? all->ends[at + r] : INFINITY; /* infinite: without keys its weights are 0 */
          total[r] = r < rows ? all->ends[at + r + s->batch * s->heads * s->queries] : 0;
          delta[r] = grad_lse && r < rows ? grad_lse[at + r] : 0;
          if (r < rows) delta[r] -= dot(grads + r * value_dim, from_out + r * out.row, s->value_dim);
          delta[r] = top[r] != INFINITY ? delta[r] : 0;
          length += 0 * delta[r];
        }
        num low = low_key(&t, a), high = high_key(&t, a + rows - 1), in_rows = at;
        Pieces pieces[BLOCK] = {0};
        memset(of_curve, 0, 2 * s->pieces * sizeof(vec));
        if (s->logits) { /* the count behind each panel, the newest first */
          lay_logits(s, at, rows, logits);
          memset(of_logits, 0, BLOCK * size.logits * sizeof(real));
          memset(run, 0, BLOCK * sizeof(real));
          real *count = weights;
          memset(count, 0, BLOCK * sizeof(real));
          for (num b = up(high, PANEL) - PANEL; b >= 0 && b + PANEL > low && high > low; b -= PANEL)
            for (num r = 0; r < rows; r += ROWS) {
              int some = 0;
              for (num i = r; i < r + ROWS; i++) some |= !((counts[b / PANEL * BLOCK + i] = count[i]) >= full);
              if (!some) continue;
              real bound = length * longest[b / PANEL];
              score(&t, queries + r * dim, dim, keys + b * dim, biases + MARGIN + t.queries - 1 - a - r + b, -1, &levels, 0, a + r, b,
                    VECTORS, FINITE(bound), slopes);
              for (num i = 0; i < ROWS; i++)
                count[r + i] = raise(logits + (r + i) * size.logits, full, count[r + i], (vec *)(slopes + i * PANEL), VECTORS, 0);
            }
        }
        for (num b = low / PANEL * PANEL; b < high; b += PANEL) {
          num first = block, last = 0, low_here = PANEL, high_here = 0; /* the queries and keys that meet in this panel */
          num corner = MARGIN + t.queries - a - BLOCK + b, panel = corner / PANEL;
          real bound = length * (longest[b / PANEL] + of_keys.longest);
          meet(&of_keys, queries, block, biases, panel, 1);
          meet(&of_values, grads, block, 0, panel, 1);
          for (num r = 0; r < rows; r += ROWS) {
            real *weight = weights + r * PANEL, *slope = slopes + r * PANEL;
            num from = most(low_key(&t, a + r) - b, 0), to = least(high_key(&t, a + r + ROWS - 1) - b, PANEL);
            num skip = from / WIDE * WIDE;
            int wide = (int)((to - skip + WIDE - 1) / WIDE);
            if (from < to) lay_levels(&levels, a + r, rows - r, b, least(PANEL, t.keys - b));
            int none = from >= to || (!s->logits && !s->curves && negligible(&t, bound, highest, &levels, a + r, b, top + r));
            if (none || wide < VECTORS) { /* what is not made below */
              memset(weight, 0, ROWS * PANEL * sizeof(real));
              memset(slope, 0, ROWS * PANEL * sizeof(real));
            }
            if (none) continue;
            first = least(first, r), last = r + ROWS, low_here = least(low_here, from), high_here = most(high_here, to);
            num place = corner % PANEL + BLOCK - 1 - r + skip;
            const real *bias = of_keys.here ? of_keys.met + r * WINDOW + place : biases + panel * PANEL + place;
            const real *more = of_values.here ? of_values.met + r * WINDOW + place : 0;
            score(&t, queries + r * dim, dim, keys + b * dim + skip, bias, of_keys.here ? WINDOW - 1 : -1, &levels, skip, a + r, b + skip,
                  wide, FINITE(bound + levels.highest), weight + skip);
            product(ROWS, wide, value_dim, grads + r * value_dim, value_dim, 1, values + b * value_dim + skip, PANEL, more,
                    WINDOW - 1, slope + skip, PANEL);
            real *diagonal = made_table + MARGIN + t.queries - 1 - a - r + b + skip;
            for (num i = 0; i < ROWS; i++, diagonal--) {
              Place at[VECTORS];
              vec *x = (vec *)(weight + i * PANEL + skip), *y = (vec *)(slope + i * PANEL + skip), *of_bias = (vec *)diagonal;
              real *own = logits + (r + i) * size.logits, count = s->logits ? counts[b / PANEL * BLOCK + r + i] : 0;
              num here = diagonal - made_table, skewed = (r + i) * WINDOW + place - i;
              vec *of_scores = of_keys.here ? (vec *)(of_keys.apart + skewed) : 0;
              vec *of_weights = of_values.here ? (vec *)(of_values.apart + skewed) : 0;
              real rate = s->curves && r + i < rows ? s->rates[p.batch * s->queries + p.q_from + a + r + i] : 0;
              if (s->logits) raise(own, full, count, x, wide, at);
              if (s->curves) pieces[r + i] = bend(&curve, distances + here, rate, nearest - here, pieces[r + i], x, wide);
              for (int w = 0; w < wide; w++) {
                x[w] = power(x[w] - top[r + i] - total[r + i]);
                y[w] = x[w] * (y[w] + delta[r + i]);
                if (grad_table && !s->curves) of_bias[w] += y[w];
                if (of_scores) of_scores[w] += y[w];
                if (of_weights) of_weights[w] += x[w];
              }
              if (s->q_levels && r + i < rows)
                of_levels((real *)y, least(wide * WIDE, t.keys - b - skip), s->grad_q_levels + in_rows + r + i,
                          s->grad_k_levels + ((split * s->batch + p.batch) * s->heads + g) * s->keys + p.k_from + b + skip);
              if (s->curves && r + i < rows)
                s->grad_rates[in_rows + r + i] += unbend(&curve, distances + here, rate, pieces[r + i], y, wide, (vec *)of_curve, diagonal);
              if (s->logits) run[r + i] = lower(own, full, count, at, run[r + i], y, wide, of_logits + (r + i) * size.logits);
            }
            gather(ROWS, dim, to - from, slope + from, PANEL, 1, flat + (b + from) * dim, made + r * dim);
          }
          if (of_keys.here) part(&of_keys, block, panel, 1, made, queries);
          if (of_values.here) part(&of_values, block, panel, 1, 0, grads);
          if (first >= last) continue;
          scatter(value_dim, low_here, high_here, last - first, weights + first * PANEL, PANEL, grads + first * value_dim,
                  made_v + b * value_dim);
          scatter(dim, low_here, high_here, last - first, slopes + first * PANEL, PANEL, queries + first * dim, made_k + b * dim);
        }
        rest(&of_keys, block, 1, made, queries);
        rest(&of_values, block, 1, 0, grads);
        for (num m = 0; m < 2 * s->pieces; m++) s->grad_curves[of_head * 3 * s->pieces + m] += sum_of(((vec *)of_curve)[m]);
        for (num r = 0; r < rows; r++) {
          store *to = out_of(grad_q, p.batch, g, p.q_from + a + r, 0);
          for (num d = 0; d < s->dim; d++) to[d] = narrow(made[r * dim + d] * (real)s->scale);
          for (num c = 0; s->logits && c <= s->columns; c++)
            s->grad_logits[(at + r) * s->columns + least(c, s->columns - 1)] += of_logits[r * size.logits + c];
        }
      }
      give(&of_keys, &s->key_vectors, s->near, of_head, s->dim, LOG2E);
      give(&of_values, &s->value_vectors, s->near, of_head, s->value_dim, 1);
      num to = of_head * (s->queries + s->keys - 1) + shift;
      for (num n = 0; grad_table && n < t.queries + t.keys - 1; n++) grad_table[to + n] += made_table[MARGIN + n];
    }
    for (num b = 0; b < t.keys; b++) {
      store *to_k = out_of(grad_k, p.batch, h, p.k_from + b, split), *to_v = out_of(grad_v, p.batch, h, p.k_from + b, split);
      for (num d = 0; d < s->dim; d++) to_k[d] = narrow(made_k[b * dim + d] / LOG2E);
      for (num d = 0; d < s->value_dim; d++) to_v[d] = narrow(made_v[b * value_dim + d]);
    }
  }
}

void backward(const Shape *s, In grad, In q, In k, In v, In out, const real *table, num table_row, const real *ends,
              const real *grad_lse, Out grad_q, Out grad_k, Out grad_v, real *grad_table, real *space) {
  Backward all = {s, grad, q, k, v, out, table, table_row, ends, grad_lse, grad_q, grad_k, grad_v, grad_table, space};
  in_parallel(backward_task, &all, s->heads / s->groups * s->shares * s->splits, 0, s->threads);
}
