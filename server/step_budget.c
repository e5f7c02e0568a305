#include "server/step_budget.h"

#include <stddef.h>

#include "engine/backend.h"

enum { TURN_SHARE = 4 }; /* one in so many rows goes to whoever has waited longest */

static const double MARGIN = 0.8; /* of the gap is aimed for: steps vary */

void step_budget_init(struct step_budget *b, int chunk, int max_gap_ms)
{
    *b = (struct step_budget){.chunk = chunk, .aim_ns = (double)max_gap_ms * 1e6 * MARGIN};
}

/* ---- learning ---- */

static int size_class(int rows)
{
    int i = 0;
    for (int most = STEP_UNIT; most < rows && i < STEP_SIZES - 1; most *= 2)
        i++;
    return i;
}

/* Moves the mean halfway to a new value. One that is out of all proportion counts as twice the mean: if it was an accident it is soon forgotten, and
 * if it was none the next ones say so too. */
static void update(struct step_cost *c, double rows, double ns)
{
    if (c->rows == 0) {
        *c = (struct step_cost){rows, ns};
        return;
    }
    const double usual = c->ns * rows / c->rows;
    c->ns = (c->ns + (usual > 0 && ns > 2 * usual ? 2 * usual : ns)) / 2;
    c->rows = (c->rows + rows) / 2;
}

/* The time of n decode rows without prompts: in proportion where there were fewer, and no less than seen where there were more, since most of it may be
 * the reading of weights. */
static double decode_ns(const struct step_budget *b, int n)
{
    const struct step_cost *c = &b->decode;
    if (n == 0)
        return 0;
    if (c->rows == 0) /* as prompt rows would take, or nothing is known */
        return b->sizes[0].rows > 0 ? b->sizes[0].ns * n / b->sizes[0].rows : 0;
    return (double)n > c->rows ? c->ns * n / c->rows : c->ns;
}

void step_budget_learn(struct step_budget *b, int decode_rows, int prompt_rows, uint64_t ns)
{
    const double total = (double)ns;
    if (prompt_rows == 0) {
        update(&b->decode, decode_rows, total);
        return;
    }
    if (prompt_rows < STEP_UNIT) /* a remainder: says little about a row */
        return;
    double decode = decode_ns(b, decode_rows);
    if (decode > total) { /* the part cannot take longer than the whole: it has become faster */
        if (b->decode.rows > 0)
            b->decode = (struct step_cost){decode_rows, total};
        decode = total;
    }
    double added = total - decode;
    if (added < total / 16)
        added = total / 16;
    struct step_cost *c = &b->sizes[size_class(prompt_rows)];
    const double before = c->rows > 0 ? c->ns / c->rows : 0;
    update(c, prompt_rows, added);
    if (before == 0)
        return;
    /* A row has become dearer or cheaper (a longer context, a busier machine): so it has in the other sizes, until they are seen again. */
    const double change = c->ns / c->rows / before;
    for (int i = 0; i < STEP_SIZES; i++)
        if (&b->sizes[i] != c)
            b->sizes[i].ns *= change;
}

/* What `rows` of prompt add: along the line between the sizes known on both sides; beyond the largest, in proportion to it, which is no less than
 * it can be since larger parts take less per row. */
static double added_ns(const struct step_budget *b, int rows)
{
    struct step_cost below = {0, 0};
    for (int i = 0; i < STEP_SIZES; i++) {
        const struct step_cost *c = &b->sizes[i];
        if (c->rows == 0)
            continue;
        if (c->rows >= rows)
            return below.ns + (c->ns - below.ns) * (rows - below.rows) / (c->rows - below.rows);
        below = *c;
    }
    return below.rows > 0 ? below.ns * rows / below.rows : 0;
}

int step_budget_rows(const struct step_budget *b, int decode_rows, uint64_t spent_ns)
{
    if (decode_rows == 0 || b->chunk <= STEP_UNIT)
        return b->chunk;
    const double room = b->aim_ns - (double)spent_ns - decode_ns(b, decode_rows);
    int best = STEP_UNIT;
    if (b->sizes[0].rows == 0)
        return best;
    for (int i = 0; i < STEP_SIZES; i++) {
        /* From a known size up to its double, in units, as long as there is time. */
        if (b->sizes[i].rows == 0)
            continue;
        const int most = b->sizes[i].rows * 2 < b->chunk ? (int)(b->sizes[i].rows * 2) : b->chunk;
        if (b->sizes[i].rows > best * 2)
            break;
        while (best + STEP_UNIT <= most && added_ns(b, best + STEP_UNIT) <= room)
            best += STEP_UNIT;
    }
    return best;
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
