/* Sums over the processes of one machine, through memory that they share: what channel.py does, in one pass each.

   Plain C: no headers of Python or torch, called by ctypes, which lets go of the interpreter meanwhile. Compiled without
   contraction (a*s + b is two roundings), so that sums have the same bits as torch's. */
#define _GNU_SOURCE
#include <linux/futex.h>
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
enum { LINE = 16, MOST_WAITING = 4096, SPINS = 1000 };

typedef struct {
    char *data;
    int64_t count, per_piece, first, num_pieces;
    int type, is_small;
} job;

typedef struct {
    char *memory, *rings;
    int64_t rank, size, num_slots, slot_bytes, small_bytes, may_spin;
    int64_t at[BELL], end;          /* pieces, over the whole life */
    job jobs[MOST_WAITING];           /* a ring: those not collected yet */
    int64_t first_job, end_job, job_at[BELL];
} channel;

static const int WIDTH[] = {4, 8, 2};

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

/* The job to which the next piece of a stage belongs. */
static job *job_of(channel *c, int stage) {
    job *found = &c->jobs[c->job_at[stage] % MOST_WAITING];
    while (c->at[stage] >= found->first + found->num_pieces) found = &c->jobs[++c->job_at[stage] % MOST_WAITING];
    return found;
}

static char *piece(job *of, int64_t number, int64_t *length) {
    int64_t start = (number - of->first) * of->per_piece;
    *length = least(of->per_piece, of->count - start);
    return of->data + start * WIDTH[of->type];
}

/* Where a process's share of a piece begins, in whole cache lines. */
static int64_t bound(channel *c, int64_t rank, int64_t length) {
    int64_t share = (length + 64 * c->size - 1) / (64 * c->size) * 64;
    return least(length, rank * share);
}

static int post(channel *c) {
    int64_t number = c->at[POSTED], length;
    if (number == c->end) return 0;
    /* What was in the slot before must have been collected by all, this process too: it reads its own slot again. */
    if (c->at[COLLECTED] <= number - c->num_slots || !have(c, COLLECTED, number - c->num_slots)) return 0;
    job *of = job_of(c, POSTED);
    char *data = piece(of, number, &length), *mine = slot(c, c->rank, number);
    int64_t width = WIDTH[of->type], start = bound(c, c->rank, length), stop = bound(c, c->rank + 1, length);
    double scale = 1.0 / (double)c->size;
    /* Of two processes, nobody reads one's own share out of one's slot. */
    if (of->is_small || c->size > 2) start = stop = length;
    CALL(scaled, of->type, ((void *)mine, (void *)data, start, scale));
    CALL(scaled, of->type, ((void *)(mine + stop * width), (void *)(data + stop * width), length - stop, scale));
    say(c, POSTED);
    return 1;
}

/* Over all slots, from a place on, in the order of ranks: the same bits whoever does it. */
static void sum(channel *c, char *data, int64_t number, int64_t place, int64_t n, int type) {
    CALL(both, type, ((void *)data, (void *)(slot(c, 0, number) + place), (void *)(slot(c, 1, number) + place), n));
    for (int64_t rank = 2; rank < c->size; rank++)
        CALL(onto, type, ((void *)data, (void *)(slot(c, rank, number) + place), n));
}

static int reduce(channel *c) {
    int64_t number = c->at[REDUCED], length;
    if (number == c->at[POSTED]) return 0;
    job *of = job_of(c, REDUCED);
    if (!of->is_small) {
        if (!have(c, POSTED, number)) return 0;
        int64_t width = WIDTH[of->type];
        char *data = piece(of, number, &length);
        int64_t start = bound(c, c->rank, length), n = bound(c, c->rank + 1, length) - start;
        char *mine = slot(c, c->rank, number) + start * width;
        data += start * width;
        if (c->size == 2) {
            char *other = slot(c, 1 - c->rank, number) + start * width;
            CALL(added, of->type, ((void *)data, (void *)mine, (void *)other, n, 0.5));
        } else {
            sum(c, data, number, start * width, n, of->type);
            memcpy(mine, data, (size_t)(n * width));
        }
    }
    say(c, REDUCED);
    return 1;
}

static int collect(channel *c) {
    int64_t number = c->at[COLLECTED], length;
    if (number == c->at[REDUCED]) return 0;
    job *of = job_of(c, COLLECTED);
    if (!have(c, of->is_small ? POSTED : REDUCED, number)) return 0;
    int64_t width = WIDTH[of->type];
    char *data = piece(of, number, &length);
    if (of->is_small) {
        sum(c, data, number, 0, length, of->type);
    } else {
        for (int64_t rank = 0; rank < c->size; rank++) {
            int64_t start = bound(c, rank, length) * width, stop = bound(c, rank + 1, length) * width;
            if (rank != c->rank) memcpy(data + start, slot(c, rank, number) + start, (size_t)(stop - start));
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
    c->small_bytes = small_bytes, c->may_spin = may_spin;
    return c;
}

void evenstep_close(channel *c) { free(c); }

/* Begin to average `count` numbers of a type in place. Gives how many pieces must be collected until they are, -1 if
   too many tensors are under way. */
int64_t evenstep_post(channel *c, void *data, int64_t count, int64_t type) {
    while (c->first_job < c->end_job) {
        job *oldest = &c->jobs[c->first_job % MOST_WAITING];
        if (c->at[COLLECTED] < oldest->first + oldest->num_pieces) break;
        c->first_job++;
    }
    if (c->end_job - c->first_job == MOST_WAITING - 1) return -1;
    int64_t per_piece = c->slot_bytes / WIDTH[type];
    job *added = &c->jobs[c->end_job++ % MOST_WAITING];
    *added = (job){data, count, per_piece, c->end, (count + per_piece - 1) / per_piece, (int)type,
                   count * WIDTH[type] <= c->small_bytes};
    c->end += added->num_pieces;
    advance(c);
    return c->end;
}

/* Go on until all is collected, for so long at most; how many pieces are. */
int64_t evenstep_advance(channel *c, double seconds) {
    advance(c);
    if (seconds <= 0) return c->at[COLLECTED];
    double end = 0;
    for (int64_t spins = 0; c->at[COLLECTED] < c->end; spins++) {
        if (advance(c)) {
            spins = 0;
        } else if (c->may_spin && spins < SPINS) {
            BREATHE();
        } else {
            double moment = now();
            if (end == 0) end = moment + seconds;
            if (moment >= end) break;
            sleep_for(c, end - moment);
        }
    }
    return c->at[COLLECTED];
}
