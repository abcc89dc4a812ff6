/* The states of Python's and NumPy's generators (MT19937) after they are seeded, for several seeds at once.

   `random.seed` is a chain of 1,247 multiplications, each of which waits for the one before. A processor computes LANES
   such chains beside each other in little more than the time of one. */
#include <stdint.h>
#include <string.h>

enum { WORDS = 624, LANES = 4 };
#if defined(__GNUC__) && !defined(__clang__)
/* As vectors, of which most processors multiply no 32-bit numbers at once, it would take longer. */
#define AS_NUMBERS __attribute__((optimize("no-tree-vectorize")))
#else
#define AS_NUMBERS
#endif

static inline uint32_t mixed(uint32_t word) { return word ^ (word >> 30); }

/* What every seed of Python begins with: init_genrand(19650218). */
static uint32_t first[WORDS][LANES];

__attribute__((constructor)) static void begin(void) {
    uint32_t word = 19650218u;
    for (int i = 0; i < WORDS; i++) {
        for (int lane = 0; lane < LANES; lane++) first[i][lane] = word;
        word = 1812433253u * mixed(word) + (uint32_t)i + 1;
    }
}

static int next(uint32_t state[WORDS][LANES], int i) {
    if (i + 1 < WORDS) return i + 1;
    memcpy(state[0], state[WORDS - 1], sizeof state[0]);
    return 1;
}

/* init_by_array, with a key of the one or two words that an int below 2**64 has. */
AS_NUMBERS static void python_states(const uint64_t *seeds, uint32_t state[WORDS][LANES]) {
    uint32_t key[2][LANES];
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t high = (uint32_t)(seeds[lane] >> 32);
        key[0][lane] = (uint32_t)seeds[lane];
        key[1][lane] = high ? high + 1 : key[0][lane];
    }
    int i = 1;
    for (int k = 0; k < WORDS; k++) {
        const uint32_t *added = key[k % 2];
        for (int lane = 0; lane < LANES; lane++)
            state[i][lane] = (state[i][lane] ^ (mixed(state[i - 1][lane]) * 1664525u)) + added[lane];
        i = next(state, i);
    }
    for (int k = 0; k < WORDS - 1; k++) {
        for (int lane = 0; lane < LANES; lane++)
            state[i][lane] = (state[i][lane] ^ (mixed(state[i - 1][lane]) * 1566083941u)) - (uint32_t)i;
        i = next(state, i);
    }
    for (int lane = 0; lane < LANES; lane++) state[0][lane] = 0x80000000u;
}

/* init_genrand of the low word, as `numpy.random.seed` does. */
AS_NUMBERS static void numpy_states(const uint64_t *seeds, uint32_t state[WORDS][LANES]) {
    for (int lane = 0; lane < LANES; lane++) state[0][lane] = (uint32_t)seeds[lane];
    for (int i = 1; i < WORDS; i++)
        for (int lane = 0; lane < LANES; lane++)
            state[i][lane] = 1812433253u * mixed(state[i - 1][lane]) + (uint32_t)i;
}

/* Rows of WORDS + 1 words, as both keep them in memory: CPython the index of the next word before them, NumPy after. */
void evenstep_seed_states(const uint64_t *seeds, int64_t num, uint32_t *python, uint32_t *numpy) {
    uint32_t state[WORDS][LANES];
    for (int64_t at = 0; at < num; at += LANES) {
        uint64_t some[LANES] = {0};
        int64_t here = num - at < LANES ? num - at : LANES;
        memcpy(some, seeds + at, (size_t)here * sizeof *seeds);
        memcpy(state, first, sizeof state);
        python_states(some, state);
        for (int64_t lane = 0; lane < here; lane++) {
            uint32_t *row = python + (at + lane) * (WORDS + 1);
            row[0] = WORDS;
            for (int i = 0; i < WORDS; i++) row[i + 1] = state[i][lane];
        }
        numpy_states(some, state);
        for (int64_t lane = 0; lane < here; lane++) {
            uint32_t *row = numpy + (at + lane) * (WORDS + 1);
            for (int i = 0; i < WORDS; i++) row[i] = state[i][lane];
            row[WORDS] = WORDS;
        }
    }
}
