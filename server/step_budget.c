#include "server/step_budget.h"

#include <stddef.h>

#include "engine/backend.h"

enum { TURN_SHARE = 4 }; /* one in so many rows goes to whoever has waited longest */

/* The part of the gap that steps are made for. Each that took longer lowers it, each that did not raises it a little: it settles where about one in
 * twenty does (0.9 * 1.005^20 is about 1). How much steps vary depends on the machine and on what else it does. */
static const double AIM_FIRST = 0.8, AIM_MOST = 0.85, AIM_LEAST = 0.25, AIM_LOWER = 0.9, AIM_RAISE = 1.005;

static const double KEEP = 0.85;  /* how much of its weight a step keeps when the next one is seen */
static const double PRIOR = 0.05; /* weight of the belief that no rows add no time, while all steps have the same size */
static const double LEAST = 0.25; /* of the time per row seen: a further row takes that much at least, until larger steps say less */

void step_budget_init(struct step_budget *b, int chunk, int max_gap_ms)
{
    *b = (struct step_budget){.chunk = chunk, .gap_ns = (double)max_gap_ms * 1e6, .aim = AIM_FIRST};
}

/* ---- learning ---- */

/* A value out of all proportion counts as three times what was expected: if it was an accident it is soon forgotten, and if it was none the next ones say
 * so too. */
static double tame(double value, double expected)
{
    return expected > 0 && value > 3 * expected ? 3 * expected : value;
}

static double mean(double old, double value)
{
    return old > 0 ? (old + tame(value, old)) / 2 : value;
}

/* The time of n decode rows without prompts: in proportion where there were fewer, and no less than seen where there were more, since most of it may be
 * the reading of weights. */
static double decode_ns(const struct step_budget *b, int n)
{
    return n > b->decode_rows && b->decode_rows > 0 ? b->decode_ns * n / b->decode_rows : b->decode_ns;
}

/* The line through the weighted steps, by least squares. */
static void fit(struct step_budget *b)
{
    const double n = b->weight + PRIOR, spread = b->xx - b->x * b->x / n;
    const double rate = b->y / b->x;
    double slope = spread > 0 ? (b->xy - b->x * b->y / n) / spread : rate;
    slope = slope > rate ? rate : slope < LEAST * rate ? LEAST * rate : slope;
    b->per_row = slope;
    b->fixed = (b->y - slope * b->x) / b->weight;
}

static void learn_aim(struct step_budget *b, double ns)
{
    const double aim = b->aim * (ns > b->gap_ns ? AIM_LOWER : AIM_RAISE);
    b->aim = aim < AIM_LEAST ? AIM_LEAST : aim > AIM_MOST ? AIM_MOST : aim;
}

static void learn_added(struct step_budget *b, double rows, double ns)
{
    if (b->weight > 0) {
        const double expected = b->fixed + b->per_row * rows, pace = mean(1, ns / expected);
        ns = tame(ns, expected);
        b->y *= pace;
        b->xy *= pace;
    }
    b->weight = b->weight * KEEP + 1;
    b->x = b->x * KEEP + rows;
    b->y = b->y * KEEP + ns;
    b->xx = b->xx * KEEP + rows * rows;
    b->xy = b->xy * KEEP + rows * ns;
    b->largest = b->largest * KEEP > rows ? b->largest * KEEP : rows;
    fit(b);
}

void step_budget_learn(struct step_budget *b, int decode_rows, int prompt_rows, uint64_t ns)
{
    const double total = (double)ns;
    if (prompt_rows == 0) {
        if (b->decode_rows == 0) /* it was counted as the prompts' so far */
            b->weight = b->x = b->y = b->xx = b->xy = b->largest = 0;
        b->decode_ns = mean(b->decode_ns, total);
        b->decode_rows = mean(b->decode_rows, decode_rows);
        return;
    }
    /* Prompts alone say little: their steps are larger than what is to be decided on. So do remainders of prompts. */
    if (decode_rows == 0 || prompt_rows < STEP_UNIT)
        return;
    if (prompt_rows > STEP_UNIT) /* what takes long without being large is not helped by aiming lower */
        learn_aim(b, total);
    double decode = decode_ns(b, decode_rows);
    if (decode > total) { /* the part cannot take longer than the whole: it has become faster */
        b->decode_ns = decode = total;
        b->decode_rows = decode_rows;
    }
    const double added = total - decode;
    learn_added(b, prompt_rows, added > total / 16 ? added : total / 16);
}

int step_budget_rows(const struct step_budget *b, int decode_rows, uint64_t spent_ns)
{
    if (decode_rows == 0 || b->chunk <= STEP_UNIT)
        return b->chunk;
    if (b->weight == 0)
        return STEP_UNIT;
    const double room = b->gap_ns * b->aim - (double)spent_ns - decode_ns(b, decode_rows);
    double rows = (room - b->fixed) / b->per_row;
    if (rows > 2 * b->largest)
        rows = 2 * b->largest;
    if (rows > b->chunk)
        rows = b->chunk;
    const int units = rows < STEP_UNIT ? 1 : (int)(rows / STEP_UNIT);
    return units * STEP_UNIT;
}

/* ---- sharing ---- */

static int least(int a, int b)
{
    return a < b ? a : b;
}

int step_chunk(const struct step_claim *c, int room)
{
    const int most = least(c->left, c->stop - c->fed);
    if (most <= room)
        return most;
    const int end = c->fed + room, line = end / GRID * GRID, unit = end / STEP_UNIT * STEP_UNIT;
    if (line > c->fed && end - line <= room / 4)
        return line - c->fed;
    return unit > c->fed ? unit - c->fed : room;
}

/* Gives `left` rows to the claims that have none yet, but not to `but`: nearest to its end first, of equals that which has waited longer. A remnant
 * is given only where it is all that is wanted. Returns what is left. */
static int give(struct step_claim *claims, int n, int but, int unit, int left)
{
    while (left > 0) {
        struct step_claim *best = NULL;
        for (int i = 0; i < n; i++) {
            struct step_claim *c = &claims[i];
            if (i == but || c->rows > 0 || (left < unit && least(c->left, c->stop - c->fed) > left))
                continue;
            if (!best || c->left < best->left || (c->left == best->left && c->turn < best->turn))
                best = c;
        }
        if (!best)
            break;
        best->rows = step_chunk(best, left);
        left -= best->rows;
    }
    return left;
}

void step_shares(struct step_budget *b, struct step_claim *claims, int n, int rows)
{
    int turn = 0;
    for (int i = 0; i < n; i++) {
        claims[i].rows = 0;
        if (claims[i].turn < claims[turn].turn)
            turn = i;
    }
    if (n == 1) {
        claims[0].rows = step_chunk(&claims[0], rows);
        return;
    }
    const int unit = least(STEP_UNIT, rows);
    b->credit = least(b->credit + rows, b->chunk * TURN_SHARE); /* in quarters of a row */
    struct step_claim *c = &claims[turn];
    const int most = least(least(c->left, c->stop - c->fed), rows);
    const int promised = least(b->credit / TURN_SHARE / unit * unit, most);
    const int but = promised ? turn : -1;

    int left = give(claims, n, but, unit, rows - promised);
    if (!promised)
        return;
    c->rows = step_chunk(c, promised + left); /* what the others left over, too */
    b->credit -= least(c->rows, promised) * TURN_SHARE;
    give(claims, n, but, unit, promised + left - c->rows);
}
