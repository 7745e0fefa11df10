/* RWKV-4's weighted mean, one token after the other, and its gradients: numerator, denominator and max stay in registers. */
#include "lanes.h"

#define FLOOR SAME(-1e38)
/* k, v [batch, length, channels]; w, u [channels]; flags [batch, length] or NULL: 1 begins a document, 2 is padding. */
typedef struct { num batch, length, channels, threads; } Shape;
typedef struct { vec top, bottom, max; } Sums;
enum { BEGINS = 1, PADDING = 2 };

INLINE num blocks_of(const Shape *s) { return (s->channels + LANES - 1) / LANES; }
INLINE int flag_of(const unsigned char *flags, num at) { return flags ? flags[at] : 0; }
INLINE Sums forgotten(Sums h) { return (Sums){SAME(0), SAME(0), FLOOR}; }

/* NaN where either is. */
INLINE vec highest(vec a, vec b) { return pick((a > b) | (a != a), a, b); }

INLINE Sums with_token(Sums h, vec w, vec k, vec v) {
  vec before = h.max - w, max = highest(before, k);
  vec old = exp_below(before - max), now = exp_below(k - max);
  return (Sums){old * h.top + now * v, old * h.bottom + now, max};
}

INLINE void run(const Shape *s, num b, num c, int some, const real *w_, const real *u_, const real *k_, const real *v_,
                const unsigned char *flags, const real *first, real *out, real *last, Sums *all) {
  num C = s->channels, BC = s->batch * C, at_state = b * C + c;
  vec w = load(w_ + c, some), u = load(u_ + c, some);
  Sums h = {load(first + at_state, some), load(first + BC + at_state, some), load(first + 2 * BC + at_state, some)};
  for (num t = 0; t < s->length; t++) {
    num at = b * s->length + t;
    int flag = flag_of(flags, at);
    vec k = load(k_ + at * C + c, some), v = load(v_ + at * C + c, some);
    if (flag & BEGINS) h = forgotten(h);
    if (all) all[t] = h;
    if (out) {
      vec max = larger(h.max, u + k), old = exp_below(h.max - max), now = exp_below(u + k - max);
      store(out + at * C + c, (old * h.top + now * v) / (old * h.bottom + now), some);
    }
    if (!(flag & PADDING)) h = with_token(h, w, k, v);
  }
  if (last) {
    store(last + at_state, h.top, some);
    store(last + BC + at_state, h.bottom, some);
    store(last + 2 * BC + at_state, h.max, some);
  }
}

typedef struct {
  const Shape *s;
  const real *w, *u, *k, *v;
  const unsigned char *flags;
  const real *first;
  real *out, *last;
} Forward;
static void forward_task(const void *call, num i, int worker) {
  const Forward *f = call;
  num b = i / blocks_of(f->s), c = i % blocks_of(f->s) * LANES, rest = f->s->channels - c;
  if (rest >= LANES) run(f->s, b, c, LANES, f->w, f->u, f->k, f->v, f->flags, f->first, f->out, f->last, NULL);
  else run(f->s, b, c, (int)rest, f->w, f->u, f->k, f->v, f->flags, f->first, f->out, f->last, NULL);
}

void forward(const Shape *s, const real *w, const real *u, const real *k, const real *v, const unsigned char *flags,
             const real *first, real *out, real *last) {
  Forward call = {s, w, u, k, v, flags, first, out, last};
  in_parallel(forward_task, &call, s->batch * blocks_of(s), s->threads, s->threads);
}

INLINE void back(const Shape *s, num b, num c, int some, const real *w_, const real *u_, const real *k_, const real *v_,
                 const unsigned char *flags, const real *first, const real *gout, const real *glast, real *gw_, real *gu_,
                 real *gk_, real *gv_, real *gfirst, Sums *all) {
  num C = s->channels, BC = s->batch * C, at_state = b * C + c;
  run(s, b, c, some, w_, u_, k_, v_, flags, first, NULL, NULL, all);
  vec w = load(w_ + c, some), u = load(u_ + c, some), gw = {0}, gu = {0};
  Sums g = {load(glast + at_state, some), load(glast + BC + at_state, some), load(glast + 2 * BC + at_state, some)};
  for (num t = s->length - 1; t >= 0; t--) {
    num at = b * s->length + t;
    int flag = flag_of(flags, at);
    vec k = load(k_ + at * C + c, some), v = load(v_ + at * C + c, some), go = load(gout + at * C + c, some);
    vec gk = {0}, gv = {0};
    Sums h = all[t];
    if (!(flag & PADDING)) { /* the state after this token */
      vec before = h.max - w, max = highest(before, k);
      vec old = exp_below(before - max), now = exp_below(k - max);
      vec by_old = (g.top * h.top + g.bottom * h.bottom) * old, by_now = (g.top * v + g.bottom) * now;
      vec by_max = g.max - by_old - by_now;
      vec shared = pick(before == k, by_max / 2, by_max); /* chosen, not multiplied by 0: by_max may be infinite */
      gk = by_now + pick(before > k, SAME(0), shared);
      gv = g.top * now;
      g = (Sums){g.top * old, g.bottom * old, by_old + pick(before < k, SAME(0), shared)};
      gw -= g.max;
    }
    vec max = highest(h.max, u + k), old = exp_below(h.max - max), now = exp_below(u + k - max);
    vec below = old * h.bottom + now, by_top = go / below, by_bottom = -by_top * (old * h.top + now * v) / below;
    vec by_first = (by_top * v + by_bottom) * now;
    g.top += by_top * old;
    g.bottom += by_bottom * old;
    g.max += (by_top * h.top + by_bottom * h.bottom) * old;
    gu += by_first;
    store(gk_ + at * C + c, gk + by_first, some);
    store(gv_ + at * C + c, gv + by_top * now, some);
    if (flag & BEGINS) g = (Sums){SAME(0), SAME(0), SAME(0)};
  }
  store(gw_ + at_state, gw, some);
  store(gu_ + at_state, gu, some);
  store(gfirst + at_state, g.top, some);
  store(gfirst + BC + at_state, g.bottom, some);
  store(gfirst + 2 * BC + at_state, g.max, some);
}

/* gw, gu [batch, channels]: the caller sums over rows. */
typedef struct {
  const Shape *s;
  const real *w, *u, *k, *v;
  const unsigned char *flags;
  const real *first, *gout, *glast;
  real *gw, *gu, *gk, *gv, *gfirst;
} Backward;
static void backward_task(const void *call, num i, int worker) {
  const Backward *a = call;
  const Shape *s = a->s;
  num b = i / blocks_of(s), c = i % blocks_of(s) * LANES, rest = s->channels - c;
  Sums *all = aligned_alloc(64, s->length * sizeof(Sums));
  if (rest >= LANES)
    back(s, b, c, LANES, a->w, a->u, a->k, a->v, a->flags, a->first, a->gout, a->glast, a->gw, a->gu, a->gk, a->gv, a->gfirst, all);
  else
    back(s, b, c, (int)rest, a->w, a->u, a->k, a->v, a->flags, a->first, a->gout, a->glast, a->gw, a->gu, a->gk, a->gv, a->gfirst,
         all);
  free(all);
}

void backward(const Shape *s, const real *w, const real *u, const real *k, const real *v, const unsigned char *flags,
              const real *first, const real *gout, const real *glast, real *gw, real *gu, real *gk, real *gv, real *gfirst) {
  Backward call = {s, w, u, k, v, flags, first, gout, glast, gw, gu, gk, gv, gfirst};
  in_parallel(backward_task, &call, s->batch * blocks_of(s), s->threads, s->threads);
}
