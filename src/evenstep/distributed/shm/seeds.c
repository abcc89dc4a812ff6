/* The states of Python's, NumPy's and torch's generators (MT19937) after they are seeded, for several seeds at once.

   `random.seed` is a chain of 1,247 multiplications, each of which waits for the one before. A processor computes LANES
   such chains beside each other in little more than the time of one. */
#include <stdint.h>

enum { WORDS = 624, LANES = 4 };
/* Rows as each keeps its state in memory: CPython has the index of the next word before the words, NumPy after them;
   a state tensor of torch has 64 bits for each: the seed, two of counters, the words, and what is zero here. */
enum { ROW = WORDS + 1, TORCH_ROW = 632, TORCH_WORDS = 3 };
#if defined(__GNUC__) && !defined(__clang__)
/* As vectors, of which most processors multiply no 32-bit numbers at once, it would take longer. */
#define AS_NUMBERS __attribute__((optimize("no-tree-vectorize")))
#else
#define AS_NUMBERS
#endif

static inline uint32_t mixed(uint32_t word) { return word ^ (word >> 30); }

/* What every seed of Python begins with: init_genrand(19650218). */
static uint32_t first[WORDS];

__attribute__((constructor)) static void begin(void) {
    first[0] = 19650218u;
    for (int i = 1; i < WORDS; i++) first[i] = 1812433253u * mixed(first[i - 1]) + (uint32_t)i;
}

/* init_by_array, with a key of the one or two words that an int below 2**64 has. */
AS_NUMBERS static void python_rows(const uint64_t *seeds, uint32_t *rows) {
    uint32_t state[WORDS][LANES], even[LANES], odd[LANES], last[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t high = (uint32_t)(seeds[lane] >> 32);
        odd[lane] = (uint32_t)seeds[lane];
        even[lane] = high ? high + 1 : odd[lane];
        last[lane] = first[0];
    }
    for (int i = 1; i < WORDS - 1; i += 2)
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t one = (first[i] ^ (mixed(last[lane]) * 1664525u)) + odd[lane];
            state[i][lane] = one;
            state[i + 1][lane] = last[lane] = (first[i + 1] ^ (mixed(one) * 1664525u)) + even[lane];
        }
    for (int lane = 0; lane < LANES; lane++) {
        last[lane] = (first[WORDS - 1] ^ (mixed(last[lane]) * 1664525u)) + odd[lane];
        state[WORDS - 1][lane] = last[lane];
        last[lane] = (state[1][lane] ^ (mixed(last[lane]) * 1664525u)) + even[lane];
        state[1][lane] = last[lane];
    }
    for (int i = 2; i < WORDS; i++)
        for (int lane = 0; lane < LANES; lane++) {
            last[lane] = (state[i][lane] ^ (mixed(last[lane]) * 1566083941u)) - (uint32_t)i;
            rows[lane * ROW + 1 + i] = last[lane];
        }
    for (int lane = 0; lane < LANES; lane++) {
        rows[lane * ROW + 2] = (state[1][lane] ^ (mixed(last[lane]) * 1566083941u)) - 1;
        rows[lane * ROW + 1] = 0x80000000u;
        rows[lane * ROW] = WORDS;
    }
}

/* init_genrand of the low word, as `numpy.random.seed` and `torch.Generator.manual_seed` do. */
AS_NUMBERS static void other_rows(const uint64_t *seeds, uint32_t *numpy, uint64_t *torch) {
    uint32_t last[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        last[lane] = (uint32_t)seeds[lane];
        torch[lane * TORCH_ROW] = seeds[lane];
        torch[lane * TORCH_ROW + TORCH_WORDS] = numpy[lane * ROW] = last[lane];
        numpy[lane * ROW + WORDS] = WORDS;
    }
    for (int i = 1; i < WORDS; i++)
        for (int lane = 0; lane < LANES; lane++) {
            last[lane] = 1812433253u * mixed(last[lane]) + (uint32_t)i;
            torch[lane * TORCH_ROW + TORCH_WORDS + i] = numpy[lane * ROW + i] = last[lane];
        }
}

/* A row of each for every seed; there are seeds, and memory, for a multiple of LANES. */
void evenstep_seed_states(const uint64_t *seeds, int64_t num, uint32_t *python, uint32_t *numpy, uint64_t *torch) {
    for (int64_t at = 0; at < num; at += LANES) {
        python_rows(seeds + at, python + at * ROW);
        other_rows(seeds + at, numpy + at * ROW, torch + at * TORCH_ROW);
    }
}
