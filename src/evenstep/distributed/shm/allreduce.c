/* Sums over the processes of one machine, through memory that they share: what channel.py does, in one pass each.

   Plain C: no headers of Python or torch, called by ctypes, which lets go of the interpreter meanwhile. Compiled without
   contraction (a*s + b is two roundings), so that sums have the same bits as torch's. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif
#if defined(__x86_64__)
#define BREATHE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define BREATHE() __asm__ volatile("yield")
#else
#define BREATHE() ((void)0)
#endif

enum { POSTED, REDUCED, COLLECTED, BELL, LINES };
enum { LINE = 16, LOOKS = 64 };
enum { EVERY_WAY, TO_FIRST, FROM_FIRST };
/* To be woken takes 0.1 ms, so a short wait is spent looking. Who has slept all the same looks for half as long the next
   time: on a busy machine, the one that is waited for may need this very core. */
static const double MOST_SPINNING = 0.002, LEAST_SPINNING = 0.00005;

typedef struct {
    char *memory, *rings;
    int64_t rank, size, num_slots, slot_bytes, small_bytes, may_spin;
    int64_t at[BELL], end;            /* pieces, over the whole life */
    /* What is averaged now: tensors, one after another as if they were one. It is cut into pieces. */
    char *const *tensors;
    const int64_t *ends;              /* where each of them ends, in numbers */
    int64_t num_tensors, per_piece, first;
    int64_t near[BELL];               /* which tensor each stage was at */
    int type, is_small, direction;    /* see evenstep_begin_one_way */
    double scale;
    /* Where a process has several rows of tensors: all of them, one row after another. See evenstep_begin_tree. */
    char *const *nodes;
    int64_t num_nodes, num_leaves, num_additions;
    const int64_t *leaves, *additions;
    char **at_leaf, *sums;            /* where a sum so far is, and memory for such */
    double spinning;                  /* for so many seconds one looks before one sleeps */
} channel;

static const int WIDTH[] = {4, 8, 2};
enum { BLOCK = 512 };                 /* numbers that go through the whole tree before the next ones do */

static inline float wide(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t rounded = (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
    return value != value ? 0x7FC0 : rounded;
}

#define SAME(x) (x)
/* scaled_X: into a slot. added_X: of two processes, a share with what the other slot has of it, also into one's own slot.
   both_X: two slots. onto_X: one more slot, of three or more. */
#define KERNELS(X, TYPE, WIDEN, NARROW, REAL)                                                                          \
    WIDE static void scaled_##X(TYPE *restrict slot, const TYPE *restrict data, int64_t n, REAL scale) {               \
        for (int64_t i = 0; i < n; i++) slot[i] = NARROW(WIDEN(data[i]) * scale);                                      \
    }                                                                                                                  \
    WIDE static void added_##X(TYPE *restrict data, TYPE *restrict slot, const TYPE *restrict other, int64_t n,        \
                               REAL scale) {                                                                           \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            TYPE mine = NARROW(WIDEN(data[i]) * scale);                                                                \
            TYPE sum = NARROW(WIDEN(mine) + WIDEN(other[i]));                                                          \
            data[i] = sum;                                                                                             \
            slot[i] = sum;                                                                                             \
        }                                                                                                              \
    }                                                                                                                  \
    WIDE static void both_##X(TYPE *restrict data, const TYPE *restrict one, const TYPE *restrict other, int64_t n) {  \
        for (int64_t i = 0; i < n; i++) data[i] = NARROW(WIDEN(one[i]) + WIDEN(other[i]));                             \
    }                                                                                                                  \
    WIDE static void onto_##X(TYPE *restrict data, const TYPE *restrict other, int64_t n) {                            \
        for (int64_t i = 0; i < n; i++) data[i] = NARROW(WIDEN(data[i]) + WIDEN(other[i]));                            \
    }
KERNELS(float, float, SAME, SAME, float)
KERNELS(double, double, SAME, SAME, double)
KERNELS(bf16, uint16_t, wide, narrow, float)

#define CALL(name, type, ...)                                                                                          \
    do {                                                                                                               \
        if (type == 0) name##_float __VA_ARGS__;                                                                       \
        else if (type == 1) name##_double __VA_ARGS__;                                                                 \
        else name##_bf16 __VA_ARGS__;                                                                                  \
    } while (0)

static int64_t *counter(channel *c, int64_t rank, int stage) {
    return (int64_t *)c->memory + (rank * LINES + stage) * LINE;
}

static int have(channel *c, int stage, int64_t number) {
    for (int64_t rank = 0; rank < c->size; rank++)
        if (rank != c->rank && __atomic_load_n(counter(c, rank, stage), __ATOMIC_ACQUIRE) <= number) return 0;
    return 1;
}

/* A process that sleeps says so in the first word of its bell, and sleeps on the second. */
static int32_t *bell(channel *c, int64_t rank) { return (int32_t *)counter(c, rank, BELL); }

static void say(channel *c, int stage) {
    c->at[stage]++;
    __atomic_store_n(counter(c, c->rank, stage), c->at[stage], __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int64_t rank = 0; rank < c->size; rank++) {
        if (rank == c->rank || !__atomic_load_n(bell(c, rank), __ATOMIC_RELAXED)) continue;
        __atomic_fetch_add(bell(c, rank) + 1, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, bell(c, rank) + 1, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
}

static char *slot(channel *c, int64_t rank, int64_t number) {
    return c->rings + (rank * c->num_slots + number % c->num_slots) * c->slot_bytes;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* How many numbers the piece of this number has. */
static int64_t length_of(channel *c, int64_t number) {
    int64_t start = (number - c->first) * c->per_piece;
    return least(c->per_piece, c->ends[c->num_tensors - 1] - start);
}

/* A run of numbers that lie together, of those from `place` to `stop` of a piece; NULL when there are no more. */
static char *run_of(channel *c, char *const *tensors, int stage, int64_t number, int64_t place, int64_t stop,
                    int64_t *n) {
    if (place >= stop) return NULL;
    int64_t at = (number - c->first) * c->per_piece + place, *near = &c->near[stage];
    while (*near > 0 && at < c->ends[*near - 1]) --*near;
    while (at >= c->ends[*near]) ++*near;
    int64_t begin = *near ? c->ends[*near - 1] : 0;
    *n = least(stop - place, c->ends[*near] - at);
    return tensors[*near] + (at - begin) * WIDTH[c->type];
}

static char *run(channel *c, int stage, int64_t number, int64_t place, int64_t stop, int64_t *n) {
    return run_of(c, c->tensors, stage, number, place, stop, n);
}

/* For all runs of a stage's piece from `from` to `to`: `data` has `n` numbers, which begin at `place` of the piece. */
#define EACH_RUN(stage, from, to)                                                                                      \
    for (int64_t place = (from), n = 0; (data = run(c, stage, number, place, to, &n)) != NULL; place += n)

/* Where a process's share of a piece begins, in whole cache lines. */
static int64_t bound(channel *c, int64_t rank, int64_t length) {
    int64_t share = (length + 64 * c->size - 1) / (64 * c->size) * 64;
    return least(length, rank * share);
}

static int post(channel *c) {
    int64_t number = c->at[POSTED];
    if (number == c->end) return 0;
    /* What was in the slot before must have been collected by all, this process too: it reads its own slot again. */
    if (c->at[COLLECTED] <= number - c->num_slots || !have(c, COLLECTED, number - c->num_slots)) return 0;
    int64_t length = length_of(c, number), width = WIDTH[c->type];
    int64_t start = bound(c, c->rank, length), stop = bound(c, c->rank + 1, length);
    char *data, *mine = slot(c, c->rank, number);
    double scale = c->scale;
    if (c->direction != EVERY_WAY) {
        if ((c->rank == 0) == (c->direction == FROM_FIRST))
            EACH_RUN(POSTED, 0, length) memcpy(mine + place * width, data, (size_t)(n * width));
        say(c, POSTED);
        return 1;
    }
    if (c->leaves != NULL) {
        for (int64_t node = 0; node < c->num_nodes; node++, mine += c->per_piece * width)
            for (int64_t place = 0, n = 0; (data = run_of(c, c->nodes + node * c->num_tensors, POSTED, number, place,
                                                          length, &n)) != NULL; place += n)
                memcpy(mine + place * width, data, (size_t)(n * width));
        say(c, POSTED);
        return 1;
    }
    /* Of two processes, nobody reads one's own share out of one's slot. */
    if (c->is_small || c->size > 2) start = stop = length;
    EACH_RUN(POSTED, 0, start) CALL(scaled, c->type, ((void *)(mine + place * width), (void *)data, n, scale));
    EACH_RUN(POSTED, stop, length) CALL(scaled, c->type, ((void *)(mine + place * width), (void *)data, n, scale));
    say(c, POSTED);
    return 1;
}

/* Over all rows of all slots, in the order of the tree. */
static void sum_tree(channel *c, char *data, int64_t number, int64_t place, int64_t n) {
    int64_t width = WIDTH[c->type];
    for (int64_t done = 0; done < n; done += BLOCK) {
        int64_t length = least(BLOCK, n - done);
        for (int64_t leaf = 0; leaf < c->num_leaves; leaf++)
            c->at_leaf[leaf] = slot(c, c->leaves[2 * leaf], number) +
                               (c->leaves[2 * leaf + 1] * c->per_piece + place + done) * width;
        if (c->num_additions == 0) memcpy(data + done * width, c->at_leaf[0], (size_t)(length * width));
        for (int64_t i = 0; i < c->num_additions; i++) {
            int64_t left = c->additions[2 * i], right = c->additions[2 * i + 1];
            char *own = c->sums + left * BLOCK * 8, *one = c->at_leaf[left], *other = c->at_leaf[right];
            char *into = i + 1 == c->num_additions ? data + done * width : own;
            if (one == into) CALL(onto, c->type, ((void *)into, (void *)other, length));
            else CALL(both, c->type, ((void *)into, (void *)one, (void *)other, length));
            c->at_leaf[left] = into;
        }
    }
}

/* Over all slots, from a place on, in the order of ranks: the same bits whoever does it. */
static void sum(channel *c, char *data, int64_t number, int64_t place, int64_t n) {
    int64_t at = place * WIDTH[c->type];
    if (c->leaves != NULL) {
        sum_tree(c, data, number, place, n);
        return;
    }
    CALL(both, c->type, ((void *)data, (void *)(slot(c, 0, number) + at), (void *)(slot(c, 1, number) + at), n));
    for (int64_t rank = 2; rank < c->size; rank++)
        CALL(onto, c->type, ((void *)data, (void *)(slot(c, rank, number) + at), n));
}

/* What all others have posted, onto the numbers of the first process, in the order of ranks. */
static void sum_onto(channel *c, int64_t number) {
    int64_t length = length_of(c, number), width = WIDTH[c->type];
    char *data;
    EACH_RUN(REDUCED, 0, length)
        for (int64_t rank = 1; rank < c->size; rank++)
            CALL(onto, c->type, ((void *)data, (void *)(slot(c, rank, number) + place * width), n));
}

static int reduce(channel *c) {
    int64_t number = c->at[REDUCED];
    if (number == c->at[POSTED]) return 0;
    if (c->direction == TO_FIRST && c->rank == 0) {
        if (!have(c, POSTED, number)) return 0;
        sum_onto(c, number);
    } else if (c->direction == EVERY_WAY && !c->is_small) {
        if (!have(c, POSTED, number)) return 0;
        int64_t length = length_of(c, number), width = WIDTH[c->type];
        int64_t start = bound(c, c->rank, length), stop = bound(c, c->rank + 1, length);
        char *data, *mine = slot(c, c->rank, number), *other = slot(c, c->rank ? 0 : 1, number);
        EACH_RUN(REDUCED, start, stop) {
            int64_t at = place * width;
            if (c->size == 2 && c->leaves == NULL) {
                CALL(added, c->type, ((void *)data, (void *)(mine + at), (void *)(other + at), n, c->scale));
            } else {
                sum(c, data, number, place, n);
                memcpy(mine + at, data, (size_t)(n * width));
            }
        }
    }
    say(c, REDUCED);
    return 1;
}

static int collect(channel *c) {
    int64_t number = c->at[COLLECTED];
    if (number == c->at[REDUCED]) return 0;
    int receives = c->direction == FROM_FIRST && c->rank != 0;
    if (receives && __atomic_load_n(counter(c, 0, POSTED), __ATOMIC_ACQUIRE) <= number) return 0;
    if (c->direction == EVERY_WAY && !have(c, c->is_small ? POSTED : REDUCED, number)) return 0;
    int64_t length = length_of(c, number), width = WIDTH[c->type];
    char *data;
    if (receives) {
        EACH_RUN(COLLECTED, 0, length) memcpy(data, slot(c, 0, number) + place * width, (size_t)(n * width));
    } else if (c->direction != EVERY_WAY) {
        /* Nothing to collect: others may write into this slot again. */
    } else if (c->is_small) {
        EACH_RUN(COLLECTED, 0, length) sum(c, data, number, place, n);
    } else {
        for (int64_t rank = 0; rank < c->size; rank++) {
            if (rank == c->rank) continue;
            char *theirs = slot(c, rank, number);
            EACH_RUN(COLLECTED, bound(c, rank, length), bound(c, rank + 1, length))
                memcpy(data, theirs + place * width, (size_t)(n * width));
        }
    }
    say(c, COLLECTED);
    return 1;
}

static int advance(channel *c) {
    int moved = 0;
    while (post(c) + reduce(c) + collect(c)) moved = 1;
    return moved;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Sleep until another process says something, for so long at most. The kernel wakes it at once, also on a machine with
   more to do than cores, where one that looks again and again has used up its turn when it matters. */
static void sleep_for(channel *c, double seconds) {
    int32_t *mine = bell(c, c->rank);
    struct timespec most = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    __atomic_store_n(mine, 1, __ATOMIC_SEQ_CST);
    int32_t rung = __atomic_load_n(mine + 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (!advance(c)) syscall(SYS_futex, mine + 1, FUTEX_WAIT, rung, &most, NULL, 0);
    __atomic_store_n(mine, 0, __ATOMIC_SEQ_CST);
}

channel *evenstep_open(void *memory, int64_t rank, int64_t size, int64_t num_slots, int64_t slot_bytes,
                       int64_t small_bytes, int64_t may_spin) {
    channel *c = calloc(1, sizeof(channel));
    if (c == NULL) return NULL;
    c->memory = memory;
    c->rings = (char *)memory + size * LINES * LINE * 8;
    c->rank = rank, c->size = size, c->num_slots = num_slots, c->slot_bytes = slot_bytes;
    c->small_bytes = small_bytes, c->may_spin = may_spin, c->spinning = MOST_SPINNING;
    return c;
}

void evenstep_close(channel *c) {
    free(c->at_leaf);
    free(c->sums);
    free(c);
}

static void begin(channel *c, const int64_t *ends, int64_t num_tensors, int64_t type, int64_t num_rows) {
    int64_t count = ends[num_tensors - 1];
    c->ends = ends, c->num_tensors = num_tensors, c->type = (int)type;
    c->per_piece = c->slot_bytes / WIDTH[type] / num_rows;
    c->is_small = count * WIDTH[type] * num_rows <= c->small_bytes;
    c->near[POSTED] = c->near[REDUCED] = c->near[COLLECTED] = 0;
    c->first = c->end;
    c->end += (count + c->per_piece - 1) / c->per_piece;
}

/* Begin to average tensors of a type in place: where they are, and where each ends in the row of all. What was begun
   before must be finished, and both lists must live until this is. */
void evenstep_begin(channel *c, char *const *tensors, const int64_t *ends, int64_t num_tensors, int64_t type) {
    c->tensors = tensors, c->leaves = NULL, c->scale = 1.0 / (double)c->size, c->direction = EVERY_WAY;
    begin(c, ends, num_tensors, type, 1);
}

/* Begin to sum tensors into those of the first process (TO_FIRST), or to copy those of the first process to all others
   (FROM_FIRST). Who only posts waits for nobody, as long as there are slots. */
void evenstep_begin_one_way(channel *c, char *const *tensors, const int64_t *ends, int64_t num_tensors, int64_t type,
                            int64_t direction) {
    c->tensors = tensors, c->leaves = NULL, c->direction = (int)direction;
    begin(c, ends, num_tensors, type, 1);
}

/* Begin to sum rows of tensors, of which a process may have none, one or several, in one order. `nodes` are those of
   this process, row by row; the sums go into the last row of the list, which may be one of them.

   `tree` has: the most rows of a process; the number of leaves, then for each the process and which of its rows it is;
   the number of additions, then for each the leaf that is added to and the leaf that is added. The first leaf becomes
   the sum of all. Returns 0 if there is no memory for it. */
int64_t evenstep_begin_tree(channel *c, char *const *nodes, int64_t num_nodes, const int64_t *ends, int64_t num_tensors,
                            int64_t type, const int64_t *tree) {
    int64_t num_rows = tree[0], num_leaves = tree[1];
    int is_pair = c->size == 2 && num_rows == 1 && num_leaves == 2;
    c->tensors = nodes + num_nodes * num_tensors;
    /* a + b = b + a: of two rows of two processes, no order is to be kept. */
    c->leaves = is_pair ? NULL : tree + 2, c->scale = 1.0, c->direction = EVERY_WAY;
    c->nodes = nodes, c->num_nodes = num_nodes, c->num_leaves = num_leaves;
    c->num_additions = tree[2 + 2 * num_leaves], c->additions = tree + 3 + 2 * num_leaves;
    free(c->at_leaf);
    free(c->sums);
    c->at_leaf = malloc((size_t)num_leaves * sizeof(char *));
    c->sums = malloc((size_t)num_leaves * BLOCK * 8);
    if (c->at_leaf == NULL || c->sums == NULL) return 0;
    begin(c, ends, num_tensors, type, num_rows);
    return 1;
}

/* Go on until all is averaged, for so long at most; whether it is. */
int64_t evenstep_advance(channel *c, double seconds) {
    double since = 0;
    for (int64_t looks = 0; c->at[COLLECTED] < c->end; looks++) {
        if (advance(c)) {
            if (since != 0 && c->spinning < MOST_SPINNING) c->spinning *= 1.25;
            since = 0;
        } else if (c->may_spin && looks % LOOKS) {
            BREATHE();
        } else {
            double moment = now(), waited;
            if (since == 0) since = moment;
            waited = moment - since;
            if (waited >= seconds) break;
            if (c->may_spin && waited < c->spinning) continue;
            if (c->spinning > LEAST_SPINNING) c->spinning /= 2;
            sleep_for(c, seconds - waited);
        }
    }
    return c->at[COLLECTED] == c->end;
}

/* Let this thread, and those that it starts from now on, run soon after they are woken, for a short turn each. Linux 6.12
   and newer take the length of a turn from sched_runtime (nanoseconds; 0 for the usual one); older ones ignore it. */
void evenstep_set_turns(int64_t nanoseconds) {
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } wanted = {0};
    if (syscall(SYS_sched_getattr, 0, &wanted, (unsigned)sizeof wanted, 0) || wanted.policy != SCHED_OTHER) return;
    wanted.size = sizeof wanted, wanted.runtime = (uint64_t)nanoseconds;
    syscall(SYS_sched_setattr, 0, &wanted, 0);
}
