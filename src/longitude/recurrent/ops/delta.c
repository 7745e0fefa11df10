/* The delta rule with decay, one token after the other, and its gradients: columns of the state stay in the cache.

     x_t = r_t W_t S_{t-1},   S_t = W_t S_{t-1} + k_t^T (v_t - x_t),               o_t = q_t S_t
   early:  x_t = r_t S_{t-1},   S_t = W_t S_{t-1} + k_t^T v_t - b_t^T x_t,           o_t = q_t S_t

   Columns of S are independent, so they are processed WIDE vectors at a time. */
#include "lanes.h"

/* `call` with NV a constant: as many vectors as the columns need. Four vectors fit 32 registers of 512 bits. Where a vector is
   several registers, more than one spills: it would take 1.1 to 1.8 times as long, and five times as long to compile. */
#if defined(__AVX512F__) && !defined(DOUBLE)
#define WIDE 4
#define BY_WIDTH(columns, call) \
  if ((columns) > 2 * LANES) { enum { NV = WIDE }; call; } \
  else if ((columns) > LANES) { enum { NV = 2 }; call; } \
  else { enum { NV = 1 }; call; }
#else
#define WIDE 1
#define BY_WIDTH(columns, call) { enum { NV = WIDE }; call; }
#endif
/* q, r [batch, groups, length, keys]; k, b [batch, heads, length, keys]; v, o [batch, heads, length, values]; log_w [batch,
   heads, length, decays], decays 1 or keys; keep [batch, length], 0 where a token begins a document, or NULL; first, last
   [batch, heads, keys, values]. b is NULL unless early. */
typedef struct { num batch, groups, length, keys, heads, values, decays, early, chunk, threads; } Shape;
typedef struct { const real *q, *r, *k, *b, *v, *log_w, *first; const unsigned char *keep; } Data;

/* One task: `nv` vectors of columns from c on, of head h (of all rows of the batch); qh: its head of queries. */
typedef struct { num h, qh, row, c; } Task;

INLINE num blocks_of(const Shape *s) { return (s->values + WIDE * LANES - 1) / (WIDE * LANES); }
INLINE Task task_of(const Shape *s, num h, num block) {
  num row = h / s->heads;
  return (Task){h, row * s->groups + h % s->heads / (s->heads / s->groups), row, block * WIDE * LANES};
}
INLINE int lanes_at(const Shape *s, num c) {
  return s->values - c >= LANES ? LANES : s->values > c ? (int)(s->values - c) : 0;
}
INLINE int kept(const Data *d, const Shape *s, Task k, num t) { return d->keep ? d->keep[k.row * s->length + t] : 1; }

/* Load nv vectors of a row [values] from column c on, with zeros past its end; and store them. */
INLINE void get(const Shape *s, int nv, vec *to, const real *row, num c) {
  for (int i = 0; i < nv; i++) to[i] = load(row + c + i * LANES, lanes_at(s, c + i * LANES));
}
INLINE void put(const Shape *s, int nv, real *row, const vec *from, num c) {
  for (int i = 0; i < nv; i++) store(row + c + i * LANES, from[i], lanes_at(s, c + i * LANES));
}
/* Decays of a token. */
INLINE void decays_of(const Shape *s, const Data *d, Task k, num t, real *w) {
  const real *at = d->log_w + (k.h * s->length + t) * s->decays;
  for (num n = 0; n < s->keys; n += LANES) {
    int some = s->keys - n < LANES ? (int)(s->keys - n) : LANES;
    vec log_w = SAME(*at);
    if (s->decays > 1) log_w = load(at + n, some);
    store(w + n, exp_of(log_w), some);
  }
}

/* The state `S` before a token -> after it, in `to`; x, what it read; o, its output, unless NULL. */
INLINE void step(const Shape *s, const Data *d, Task k, int nv, num t, const vec *S, vec *to, const real *w, vec *x, vec *o) {
  num N = s->keys, here = k.h * s->length + t, shared = (k.qh * s->length + t) * N;
  const real *r = d->r + shared, *q = d->q + shared, *key = d->k + here * N, *b = d->b ? d->b + here * N : NULL;
  vec u[WIDE], out[WIDE] = {0}, read[WIDE] = {0};
  if (kept(d, s, k, t))
    for (num n = 0; n < N; n++)
      for (int c = 0; c < nv; c++) {
        vec old = S[n * nv + c], less = w[n] * old;
        if (s->early) read[c] += r[n] * old;
        else read[c] += r[n] * less;
        to[n * nv + c] = less;
      }
  else memset(to, 0, N * nv * sizeof(vec)); /* whatever it was: 0 times NaN would be NaN */
  get(s, nv, u, d->v + here * s->values, k.c);
  if (!s->early) for (int c = 0; c < nv; c++) u[c] -= read[c];
  for (num n = 0; n < N; n++)
    for (int c = 0; c < nv; c++) {
      vec now = to[n * nv + c] + key[n] * u[c];
      if (s->early) now -= b[n] * read[c];
      out[c] += q[n] * now;
      to[n * nv + c] = now;
    }
  for (int c = 0; c < nv; c++) x[c] = read[c];
  if (o) for (int c = 0; c < nv; c++) o[c] = out[c];
}

INLINE void run(const Shape *s, const Data *d, Task k, int nv, real *out, real *last, vec *S, real *w) {
  num N = s->keys, V = s->values;
  vec x[WIDE], o[WIDE];
  for (num n = 0; n < N; n++) get(s, nv, S + n * nv, d->first + (k.h * N + n) * V, k.c);
  for (num t = 0; t < s->length; t++) {
    decays_of(s, d, k, t, w);
    step(s, d, k, nv, t, S, S, w, x, o);
    put(s, nv, out + (k.h * s->length + t) * V, o, k.c);
  }
  for (num n = 0; n < N; n++) put(s, nv, last + (k.h * N + n) * V, S + n * nv, k.c);
}

typedef struct { const Shape *s; Data d; real *out, *last; } Forward;
static void forward_task(const void *call, num i, int worker) {
  const Forward *f = call;
  const Shape *s = f->s;
  Task task = task_of(s, i / blocks_of(s), i % blocks_of(s));
  vec *S = aligned_alloc(64, (s->keys * WIDE + s->keys / LANES + 1) * sizeof(vec));
  real *w = (real *)(S + s->keys * WIDE);
  BY_WIDTH(s->values - task.c, run(s, &f->d, task, NV, f->out, f->last, S, w))
  free(S);
}

void forward(const Shape *s, const real *q, const real *r, const real *k, const real *b, const real *v, const real *log_w,
             const unsigned char *keep, const real *first, real *out, real *last) {
  Forward call = {s, {q, r, k, b, v, log_w, first, keep}, out, last};
  in_parallel(forward_task, &call, s->batch * s->heads * blocks_of(s), s->threads, s->threads);
}

/* Sums over the lanes of sixteen rows, times w unless NULL; added unless these are the first columns. */
INLINE void sum_rows(real *to, vec *rows, int some, int more, const real *w) {
  vec sums = sums_of(rows);
  if (w) sums *= load(w, some);
  if (more) sums += load(to, some);
  store(to, sums, some);
}

/* A first pass stores the state before each chunk; then chunks are run again from the last to the first.
   gq, gr, gk, gb, gw [batch, heads, length, keys]: the caller sums over heads that share q and r. */
INLINE void back(const Shape *s, const Data *d, Task k, int nv, const real *gout, const real *glast, real *gq, real *gr, real *gk,
                 real *gb, real *gv, real *gw, real *gfirst, vec *scratch) {
  num N = s->keys, V = s->values, T = s->chunk, each = N * nv, count = (s->length + T - 1) / T, padded = N / LANES + 1;
  vec *G = scratch, *starts = G + each, *S = starts + count * each, *read = S + (T + 1) * each;
  real *decays = (real *)(read + T * nv);
  int more = k.c > 0;
  for (num n = 0; n < N; n++) {
    get(s, nv, G + n * nv, glast + (k.h * N + n) * V, k.c);
    get(s, nv, starts + n * nv, d->first + (k.h * N + n) * V, k.c);
  }
  for (num t = 0; t < (count - 1) * T; t++) {
    vec *now = starts + (t / T + 1) * each;
    decays_of(s, d, k, t, decays);
    step(s, d, k, nv, t, t % T ? now : now - each, now, decays, read, NULL);
  }
  for (num from = (count - 1) * T; from >= 0; from -= T) {
    num to = from + T < s->length ? from + T : s->length;
    memcpy(S, starts + from / T * each, each * sizeof(vec));
    for (num t = from; t < to; t++) {
      real *w = decays + (t - from) * padded * LANES;
      decays_of(s, d, k, t, w);
      step(s, d, k, nv, t, S + (t - from) * each, S + (t - from + 1) * each, w, read + (t - from) * nv, NULL);
    }
    for (num t = to - 1; t >= from; t--) {
      num here = k.h * s->length + t, at = here * N, shared = (k.qh * s->length + t) * N;
      const real *w = decays + (t - from) * padded * LANES;
      const vec *before = S + (t - from) * each, *after = before + each, *x = read + (t - from) * nv;
      vec go[WIDE], u[WIDE], of_u[WIDE] = {0}, of_x[WIDE] = {0};
      get(s, nv, go, gout + here * V, k.c);
      get(s, nv, u, d->v + here * V, k.c);
      if (!s->early) for (int c = 0; c < nv; c++) u[c] -= x[c];
      for (num m = 0; m < N; m += LANES) { /* the output and what was written */
        int some = N - m < LANES ? (int)(N - m) : LANES;
        vec of_q[LANES] = {0}, of_k[LANES] = {0}, of_b[LANES] = {0};
        for (int i = 0; i < some; i++)
          for (int c = 0; c < nv; c++) {
            num n = m + i;
            vec g = G[n * nv + c] + d->q[shared + n] * go[c];
            G[n * nv + c] = g;
            of_q[i] += after[n * nv + c] * go[c];
            of_k[i] += g * u[c];
            of_u[c] += d->k[at + n] * g;
            if (s->early) {
              of_b[i] -= g * x[c];
              of_x[c] -= d->b[at + n] * g;
            }
          }
        sum_rows(gq + at + m, of_q, some, more, NULL);
        sum_rows(gk + at + m, of_k, some, more, NULL);
        if (s->early) sum_rows(gb + at + m, of_b, some, more, NULL);
      }
      put(s, nv, gv + here * V, of_u, k.c);
      if (!s->early) for (int c = 0; c < nv; c++) of_x[c] = -of_u[c];
      int stay = kept(d, s, k, t);
      for (num m = 0; m < N; m += LANES) { /* what was read, and the decay; nothing goes to a state that was dropped */
        int some = N - m < LANES ? (int)(N - m) : LANES;
        vec of_r[LANES] = {0}, of_w[LANES] = {0};
        for (int i = 0; i < some; i++)
          for (int c = 0; c < nv; c++) {
            num n = m + i;
            vec g = G[n * nv + c], old = {0}, by_read = d->r[shared + n] * of_x[c];
            if (stay) old = before[n * nv + c];
            if (!s->early) g += by_read;
            of_r[i] += of_x[c] * old;
            of_w[i] += g * old;
            g *= w[n];
            if (s->early) g += by_read;
            if (!stay) g = (vec){0};
            G[n * nv + c] = g;
          }
        sum_rows(gr + at + m, of_r, some, more, s->early ? NULL : w + m);
        sum_rows(gw + at + m, of_w, some, more, w + m);
      }
    }
  }
  for (num n = 0; n < N; n++) put(s, nv, gfirst + (k.h * N + n) * V, G + n * nv, k.c);
}

typedef struct { const Shape *s; Data d; const real *gout, *glast; real *gq, *gr, *gk, *gb, *gv, *gw, *gfirst; } Backward;
static void backward_task(const void *call, num h, int worker) {
  const Backward *a = call;
  const Shape *s = a->s;
  num chunks = (s->length + s->chunk - 1) / s->chunk;
  num vectors = s->keys * WIDE * (chunks + s->chunk + 2) + s->chunk * (WIDE + s->keys / LANES + 1);
  vec *scratch = aligned_alloc(64, vectors * sizeof(vec));
  for (num i = 0; i < blocks_of(s); i++) {
    Task task = task_of(s, h, i);
    BY_WIDTH(s->values - task.c,
             back(s, &a->d, task, NV, a->gout, a->glast, a->gq, a->gr, a->gk, a->gb, a->gv, a->gw, a->gfirst, scratch))
  }
  free(scratch);
}

void backward(const Shape *s, const real *q, const real *r, const real *k, const real *b, const real *v, const real *log_w,
              const unsigned char *keep, const real *first, const real *gout, const real *glast, real *gq, real *gr, real *gk,
              real *gb, real *gv, real *gw, real *gfirst) {
  Backward call = {s, {q, r, k, b, v, log_w, first, keep}, gout, glast, gq, gr, gk, gb, gv, gw, gfirst};
  in_parallel(backward_task, &call, s->batch * s->heads, s->threads, s->threads);
}
