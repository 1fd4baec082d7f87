/* What private arrays of two ranks can reach on one node, with nothing but C between them.
 *
 *     cc -O3 -mavx2 -pthread benchmarks/exchange.c -o out/exchange && out/exchange 100 [broadcast ...]
 *
 * Two threads, each on a core, stand for the ranks. Their arrays are written anew before each call and pass
 * through a ring of slots in chunks: in an all-reduce each rank puts its own, adds the other's to it and stores
 * the sum in its place, or `elsewhere`; in a broadcast one puts and the other copies; in a gather one puts its half of the array,
 * and in an all-gather both do, and copy their own half, too, before the others' chunks or whenever one has not
 * come. That is as many bytes as by halves, with fewer meetings. Combinations of chunk, ring, stores into the
 * caches or past them, into slots and into results, and of fetching ahead what is read, are drawn and tried for as
 * many seconds as said. Of each the median of the slower rank is taken, and the best is printed, apart for calls
 * between which 512 KiB went from core to core at less or more than 25 GB/s, or than -DLIMIT=5.5 (`turns.py` hands
 * over in the same way), and behind it the best by each kind of stores. x86-64 with AVX2. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ALLREDUCE, ELSEWHERE, BROADCAST, GATHER, ALLGATHER, KINDS };
enum { PLAIN, SLOTS, RESULT, BOTH, STORES }; /* what is stored past the caches; an all-reduce's result in its place never is */
enum { SIZES = 6, MOST_CALLS = 400, HANDED = 1 << 19, LARGEST = 64 << 20 };
static const char *KIND[] = {"allreduce", "elsewhere", "broadcast", "gather", "allgather"};
static const char *STORED[] = {"plain", "slots streamed", "result streamed", "both streamed"};
static const size_t BYTES[SIZES] = {64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
static const size_t CHUNKS[] = {16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10};
static const size_t RINGS[] = {256 << 10, 512 << 10, 1 << 20, 4 << 20};
#ifndef LIMIT
#define LIMIT 25. /* GB/s */
#endif
#ifndef PATIENCE
#define PATIENCE 60. /* seconds in one wait: a call takes milliseconds, and the core may be shared */
#endif

typedef struct {
    _Alignas(128) atomic_long number;
} Word;

typedef struct {
    int kind, stores, late; /* late: the own half is copied when there is nothing else to do */
    size_t bytes, chunk, ring, ahead;
} Way;

static char *slots[2], *array[2], *result[2], *handed, *own[2];
static Word filled[2], emptied[2], met[2], turn;
static Way way;
static int calls;
static double times[2][MOST_CALLS], handing[2];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static long seen(Word *word) { return atomic_load_explicit(&word->number, memory_order_acquire); }
static void tell(Word *word, long number) { atomic_store_explicit(&word->number, number, memory_order_release); }

static void look_at_the_clock(long polls, double began) {
    if (polls % 4096 || now() < began + PATIENCE) return;
    fprintf(stderr, "exchange: the other rank has not come within %g s\n", PATIENCE);
    exit(1);
}

static void await(Word *word, long number) {
    const double began = now();
    for (long polls = 1; seen(word) < number; polls++) {
        _mm_pause();
        look_at_the_clock(polls, began);
    }
}

static void bind(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
}

static void move(char *to, const char *from, size_t bytes, int streams) {
    for (size_t i = 0; i < bytes; i += 64) {
        if (way.ahead) _mm_prefetch(from + i + way.ahead, _MM_HINT_T0);
        const __m256i a = _mm256_load_si256((void *)(from + i)), b = _mm256_load_si256((void *)(from + i + 32));
        __m256i *line = (void *)(to + i);
        if (streams) {
            _mm256_stream_si256(line, a);
            _mm256_stream_si256(line + 1, b);
        } else {
            _mm256_store_si256(line, a);
            _mm256_store_si256(line + 1, b);
        }
    }
    if (streams) _mm_sfence();
}

static void add(float *to, const float *own, const float *from, size_t bytes, int streams) {
    for (size_t i = 0; i < bytes / 4; i += 8) {
        if (way.ahead && i % 16 == 0) _mm_prefetch((const char *)(from + i) + way.ahead, _MM_HINT_T0);
        const __m256 sum = _mm256_add_ps(_mm256_load_ps(own + i), _mm256_load_ps(from + i));
        if (streams) _mm256_stream_ps(to + i, sum);
        else _mm256_store_ps(to + i, sum);
    }
    if (streams) _mm_sfence();
}

static void *rank(void *number) {
    const int me = (int)(long)number, other = 1 - me, joins = way.kind == GATHER || way.kind == ALLGATHER;
    const int puts = way.kind == GATHER ? me == 1 : way.kind != BROADCAST || me == 0;
    const int takes = way.kind == GATHER ? me == 0 : way.kind != BROADCAST || me == 1;
    const size_t bytes = joins ? way.bytes / 2 : way.bytes; /* that a rank brings */
    const long count = way.ring / way.chunk, parts = bytes / way.chunk;
    char *const joined = result[me] + other * bytes, *const half = result[me] + me * bytes;
    char *const dest = joins ? joined : way.kind == ELSEWHERE ? result[me] : array[me];
    const int slots_stream = way.stores == SLOTS || way.stores == BOTH;
    const int result_streams = way.stores == RESULT || way.stores == BOTH;
    long base = 0;
    bind(me);
    for (int call = 0; call < calls; call++, base += parts) {
        for (size_t i = 0; i < bytes / 4; i++) ((float *)array[me])[i] = 1;
        tell(&met[me], call + 1);
        await(&met[other], call + 1);
        const double began = now();
        long put = puts ? 0 : parts, taken = takes ? 0 : parts, copied = joins && takes ? 0 : parts;
        for (long polls = 1; put < parts || taken < parts || copied < parts; polls++) {
            look_at_the_clock(polls, began);
            if (put < parts && seen(&emptied[other]) > base + put - count) {
                move(slots[me] + (base + put) % count * way.chunk, array[me] + put * way.chunk, way.chunk, slots_stream);
                tell(&filled[me], base + ++put);
            }
            const int is_there = taken < parts && (taken < put || !puts) && seen(&filled[other]) > base + taken;
            if (copied < parts && !(way.late && is_there)) {
                move(half + copied * way.chunk, array[me] + copied * way.chunk, way.chunk, result_streams);
                copied++;
            } else if (is_there) {
                const char *from = slots[other] + (base + taken) % count * way.chunk;
                char *const to = dest + taken * way.chunk, *const mine = array[me] + taken * way.chunk;
                if (joins || way.kind == BROADCAST) move(to, from, way.chunk, result_streams);
                else add((float *)to, (const float *)mine, (const float *)from, way.chunk, result_streams);
                tell(&emptied[me], base + ++taken);
            }
        }
        times[me][call] = now() - began;
    }
    return 0;
}

static void *hand_over(void *number) {
    const int me = (int)(long)number;
    bind(me);
    handing[me] = 0;
    for (int i = 0; i < 20; i++) {
        await(&turn, 2 * i + me);
        const double began = now();
        memcpy(me ? own[1] : handed, me ? handed : own[0], HANDED);
        if (i >= 4) handing[me] += now() - began;
        tell(&turn, 2 * i + me + 1);
    }
    return 0;
}

static void both(void *(*body)(void *)) {
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) filled[i].number = emptied[i].number = met[i].number = turn.number = 0;
    for (long i = 0; i < 2; i++)
        if (pthread_create(&threads[i], 0, body, (void *)i)) exit(1);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], 0);
}

static int is_fast(void) {
    both(hand_over);
    return 16.0 * HANDED / (handing[0] + handing[1]) / 1e9 >= LIMIT;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double seconds(void) {
    calls = 6e7 / way.bytes;
    if (calls > MOST_CALLS) calls = MOST_CALLS;
    if (calls < 6) calls = 6;
    both(rank);
    for (int i = 0; i < calls; i++) times[0][i] = times[0][i] > times[1][i] ? times[0][i] : times[1][i];
    qsort(times[0], calls, sizeof(double), compare);
    return times[0][calls / 2];
}

static void *memory(size_t bytes) {
    void *made = aligned_alloc(4096, bytes);
    if (!made) exit(1);
    return memset(made, 1, bytes);
}

static Way best_way[2][KINDS][SIZES][STORES];
static double best[2][KINDS][SIZES][STORES];

static int drawn(int below) { return rand() / (RAND_MAX + 1.0) * below; }

static void try_one(int kind) {
    const int size = drawn(SIZES), c = drawn(sizeof CHUNKS / sizeof *CHUNKS), r = drawn(sizeof RINGS / sizeof *RINGS);
    const int stores = drawn(kind == ALLREDUCE ? RESULT : STORES), joins = kind == GATHER || kind == ALLGATHER;
    if (CHUNKS[c] > RINGS[r] || CHUNKS[c] > BYTES[size] >> joins || (r && RINGS[r - 1] >= 2 * BYTES[size])) return;
    way = (Way){kind, stores, joins && drawn(2), BYTES[size], CHUNKS[c], RINGS[r], drawn(2) * 4096};
    const int fast = is_fast();
    const double took = seconds();
    double *const least = &best[fast][kind][size][stores];
    if (is_fast() != fast || (*least && *least <= took)) return;
    *least = took;
    best_way[fast][kind][size][stores] = way;
}

static void print(int fast, int kind, int size) {
    const double *const took = best[fast][kind][size];
    int least = -1;
    for (int stores = 0; stores < STORES; stores++)
        if (took[stores] && (least < 0 || took[stores] < took[least])) least = stores;
    if (least < 0) return;
    const Way found = best_way[fast][kind][size][least];
    printf("%s %g GB/s  %s %6zu KiB %9.1f us  chunk %zu KiB, ring %zu KiB%s%s;", fast ? "over " : "under", LIMIT, KIND[kind],
           found.bytes >> 10, 1e6 * took[least], found.chunk >> 10, found.ring >> 10,
           found.ahead ? ", fetched ahead" : "", found.late ? ", own half late" : "");
    for (int stores = 0; stores < STORES; stores++)
        if (took[stores]) printf(" %s %.1f", STORED[stores], 1e6 * took[stores]);
    puts("");
}

static int is_wanted(int kind, int argc, char **argv) {
    for (int i = 2; i < argc; i++)
        if (!strcmp(argv[i], KIND[kind])) return 1;
    return argc <= 2;
}

int main(int argc, char **argv) {
    const double end = now() + (argc > 1 ? atof(argv[1]) : 60);
    handed = memory(HANDED);
    for (int i = 0; i < 2; i++) {
        slots[i] = memory(4 << 20);
        array[i] = memory(LARGEST + 4096);
        result[i] = memory(LARGEST);
        own[i] = memory(HANDED);
    }
    while (now() < end) {
        const int kind = drawn(KINDS);
        if (is_wanted(kind, argc, argv)) try_one(kind);
    }
    for (int fast = 0; fast < 2; fast++)
        for (int kind = 0; kind < KINDS; kind++)
            for (int size = 0; size < SIZES; size++) print(fast, kind, size);
    return 0;
}
