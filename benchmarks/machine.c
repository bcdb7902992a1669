/* Measures this machine's peak rates with one thread on each of THREADS processors, and prints them as a line of JSON.
 *
 *   cc -O3 -march=native -ffp-contract=fast -pthread machine.c -o machine
 *   machine THREADS MEBIBYTES REPEATS MILLISECONDS
 *
 * read: bytes/s of reading a buffer of MEBIBYTES, of which each thread reads one contiguous part; median, minimum and
 * maximum of REPEATS. The buffer has been written before, and is in huge pages if the system has them.
 * fp32, bf16_dot, bf16_tile, int8_dot, int8_tile: operations/s (a multiplication and an addition are two) on registers,
 * without loads, in MILLISECONDS: fused multiply-add, AVX-512 BF16's vdpbf16ps, AMX's tdpbf16ps, VNNI's vpdpbusd (of
 * AVX-512 or AVX), AMX's tdpbusd. null: the processor has no such instruction.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__AVX512BF16__) || defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__AMX_TILE__)
#include <immintrin.h>
#endif

enum { MAX_THREADS = 256, MAX_REPEATS = 99 };

static int num_threads, num_repeats;
static double seconds_per_test;
static uint8_t* buffer;
static size_t num_bytes;
static int processors[MAX_THREADS];
static pthread_barrier_t barrier;
static double starts[MAX_REPEATS], ends[MAX_REPEATS], rates[MAX_THREADS];
static volatile uint64_t sink;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void stay_on_processor(int thread) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processors[thread], &set);
  sched_setaffinity(0, sizeof set, &set);
}

/* GCC and Clang compile these to the widest registers of the processor. */
typedef uint64_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

static void* read_memory(void* argument) {
  const int thread = (int)(intptr_t)argument;
  stay_on_processor(thread);
  const size_t part = num_bytes / (size_t)num_threads / sizeof(Words) / 4 * 4;
  const Words* words = (const Words*)buffer + part * (size_t)thread;
  for (int repeat = 0; repeat < num_repeats; ++repeat) {
    pthread_barrier_wait(&barrier);
    if (thread == 0) starts[repeat] = now();
    Words a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i < part; i += 4) {
      a ^= words[i];
      b ^= words[i + 1];
      c ^= words[i + 2];
      d ^= words[i + 3];
    }
    const Words sum = a ^ b ^ c ^ d;
    sink ^= sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
    pthread_barrier_wait(&barrier);
    if (thread == 0) ends[repeat] = now();
  }
  return NULL;
}

/* Twelve independent sums hide the latency. Each is opaque after every step, so that the compiler precomputes nothing. */
#define TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
enum { NUM_SUMS = 12, STEPS_PER_LOOK = 20000 };

#ifdef __AVX512F__
#define OPAQUE(x) __asm__ volatile("" : "+v"(x))
#else
#define OPAQUE(x) __asm__ volatile("" : "+m"(x))
#endif

static double fp32_operations(void) {
#ifdef __AVX512F__
  typedef Floats Sum;
#elif defined(__AVX2__)
  typedef float Sum __attribute__((vector_size(32)));
#undef OPAQUE
#define OPAQUE(x) __asm__ volatile("" : "+x"(x))
#else
  typedef float Sum __attribute__((vector_size(16)));
#undef OPAQUE
#ifdef __aarch64__
#define OPAQUE(x) __asm__ volatile("" : "+w"(x))
#else
#define OPAQUE(x) __asm__ volatile("" : "+x"(x))
#endif
#endif
  Sum factor, term;
  for (size_t i = 0; i < sizeof(Sum) / 4; ++i) factor[i] = 0.9999f, term[i] = 0.0001f;
  OPAQUE(factor);
  OPAQUE(term);
#define DECLARE(i) Sum sum##i = term;
#define STEP(i) sum##i = sum##i * factor + term; OPAQUE(sum##i);
#define USE(i) total += sum##i[0];
  TWELVE(DECLARE)
  for (int step = 0; step < STEPS_PER_LOOK; ++step) { TWELVE(STEP) }
  float total = 0;
  TWELVE(USE)
  sink ^= (uint64_t)total;
  return 2.0 * NUM_SUMS * STEPS_PER_LOOK * sizeof(Sum) / 4;
#undef DECLARE
#undef STEP
#undef USE
}

#ifdef __AVX512BF16__
static double dot_operations(void) {
  __m512i ones = _mm512_set1_epi16(0x3f80);
  __asm__ volatile("" : "+v"(ones));
#define DECLARE(i) __m512 sum##i = _mm512_setzero_ps();
#define STEP(i)                                                         \
  sum##i = _mm512_dpbf16_ps(sum##i, (__m512bh)ones, (__m512bh)ones);    \
  __asm__ volatile("" : "+v"(sum##i));
#define USE(i) total += _mm512_cvtss_f32(sum##i);
  TWELVE(DECLARE)
  for (int step = 0; step < STEPS_PER_LOOK; ++step) { TWELVE(STEP) }
  float total = 0;
  TWELVE(USE)
  sink ^= (uint64_t)total;
  return 2.0 * NUM_SUMS * STEPS_PER_LOOK * 32;
#undef DECLARE
#undef STEP
#undef USE
}
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#ifdef __AVX512VNNI__
typedef __m512i Bytes;
#define MULTIPLY_BYTES(sum) _mm512_dpbusd_epi32(sum, ones, ones)
#else
typedef __m256i Bytes;
#define MULTIPLY_BYTES(sum) _mm256_dpbusd_avx_epi32(sum, ones, ones)
#endif

static double byte_dot_operations(void) {
  Bytes ones;
  for (size_t i = 0; i < sizeof ones / 8; ++i) ones[i] = 0x0101010101010101;
  __asm__ volatile("" : "+v"(ones));
#define DECLARE(i) Bytes sum##i = {0};
#define STEP(i)                 \
  sum##i = MULTIPLY_BYTES(sum##i); \
  __asm__ volatile("" : "+v"(sum##i));
#define USE(i) total += (double)sum##i[0];
  TWELVE(DECLARE)
  for (int step = 0; step < STEPS_PER_LOOK; ++step) { TWELVE(STEP) }
  double total = 0;
  TWELVE(USE)
  sink ^= (uint64_t)(int64_t)total;
  return 2.0 * NUM_SUMS * STEPS_PER_LOOK * sizeof ones;
#undef DECLARE
#undef STEP
#undef USE
}
#endif

#ifdef __AMX_TILE__
/* Linux lets a process use tiles only on request: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
static int may_use_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

static void configure_tiles(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  for (int tile = 0; tile < 8; ++tile) shape.bytes_per_row[tile] = 64, shape.rows[tile] = 16;
  /* GCC 12 takes _tile_loadconfig for a read of eight bytes and does not write the others. */
  __asm__ volatile("" : : "m"(shape));
  _tile_loadconfig(&shape);
}

#define TILE_OPERATIONS(name, multiply, numbers_per_row)                                                         \
  static double name(void) {                                                                                   \
    configure_tiles();                                                                                         \
    static const uint8_t zeros[16 * 64];                                                                       \
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);                                                \
    _tile_loadd(4, zeros, 64); _tile_loadd(5, zeros, 64); _tile_loadd(6, zeros, 64); _tile_loadd(7, zeros, 64); \
    for (int step = 0; step < STEPS_PER_LOOK; ++step) {                                                        \
      multiply(0, 4, 6);                                                                                       \
      multiply(1, 4, 7);                                                                                       \
      multiply(2, 5, 6);                                                                                       \
      multiply(3, 5, 7);                                                                                       \
    }                                                                                                          \
    _tile_release();                                                                                           \
    return 2.0 * 4 * STEPS_PER_LOOK * 16 * 16 * numbers_per_row;                                               \
  }
#ifdef __AMX_BF16__
TILE_OPERATIONS(tile_operations, _tile_dpbf16ps, 32)
#endif
#ifdef __AMX_INT8__
TILE_OPERATIONS(byte_tile_operations, _tile_dpbusd, 64)
#endif
#endif

static double (*operations)(void);

static void* compute(void* argument) {
  const int thread = (int)(intptr_t)argument;
  stay_on_processor(thread);
  operations();
  pthread_barrier_wait(&barrier);
  const double start = now();
  double done = 0, time = 0;
  while (time < seconds_per_test) {
    done += operations();
    time = now() - start;
  }
  rates[thread] = done / time;
  return NULL;
}

static void run_threads(void* (*work)(void*)) {
  pthread_t threads[MAX_THREADS];
  pthread_barrier_init(&barrier, NULL, (unsigned)num_threads);
  for (int i = 0; i < num_threads; ++i) pthread_create(&threads[i], NULL, work, (void*)(intptr_t)i);
  for (int i = 0; i < num_threads; ++i) pthread_join(threads[i], NULL);
  pthread_barrier_destroy(&barrier);
}

static void print_rate(const char* name, double (*test)(void)) {
  if (test == NULL) {
    printf(", \"%s\": null", name);
    return;
  }
  operations = test;
  run_threads(compute);
  double sum = 0;
  for (int i = 0; i < num_threads; ++i) sum += rates[i];
  printf(", \"%s\": %.6g", name, sum);
}

static int compare(const void* left, const void* right) {
  const double a = *(const double*)left, b = *(const double*)right;
  return (a > b) - (a < b);
}

/* The processors that this process may use, in order. */
static int list_processors(void) {
  cpu_set_t set;
  int count = 0;
  sched_getaffinity(0, sizeof set, &set);
  for (int i = 0; i < CPU_SETSIZE && count < MAX_THREADS; ++i)
    if (CPU_ISSET(i, &set)) processors[count++] = i;
  return count;
}

int main(int argc, char** argv) {
  if (argc != 5) return fprintf(stderr, "usage: machine THREADS MEBIBYTES REPEATS MILLISECONDS\n"), 2;
  num_threads = atoi(argv[1]);
  num_bytes = (size_t)atol(argv[2]) << 20;
  num_repeats = atoi(argv[3]);
  seconds_per_test = atof(argv[4]) / 1e3;
  const int num_processors = list_processors();
  if (num_threads < 1 || num_threads > num_processors)
    return fprintf(stderr, "%d threads need as many processors; there are %d\n", num_threads, num_processors), 2;
  if (num_bytes == 0 || num_repeats < 1 || num_repeats > MAX_REPEATS)
    return fprintf(stderr, "MEBIBYTES must be positive and REPEATS from 1 to %d\n", MAX_REPEATS), 2;
  buffer = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (buffer == MAP_FAILED) return perror("mmap"), 1;
  madvise(buffer, num_bytes, MADV_HUGEPAGE);
  for (size_t i = 0; i < num_bytes; i += 64) *(uint64_t*)(buffer + i) = i * 2654435761u;
  run_threads(read_memory);
  double read[MAX_REPEATS];
  for (int i = 0; i < num_repeats; ++i) read[i] = (double)num_bytes / (ends[i] - starts[i]);
  qsort(read, (size_t)num_repeats, sizeof *read, compare);
  printf("{\"threads\": %d, \"read\": %.6g, \"read_least\": %.6g, \"read_most\": %.6g", num_threads,
         read[num_repeats / 2], read[0], read[num_repeats - 1]);
  print_rate("fp32", fp32_operations);
#ifdef __AVX512BF16__
  print_rate("bf16_dot", dot_operations);
#else
  print_rate("bf16_dot", NULL);
#endif
#ifdef __AMX_BF16__
  print_rate("bf16_tile", may_use_tiles() ? tile_operations : NULL);
#else
  print_rate("bf16_tile", NULL);
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  print_rate("int8_dot", byte_dot_operations);
#else
  print_rate("int8_dot", NULL);
#endif
#ifdef __AMX_INT8__
  print_rate("int8_tile", may_use_tiles() ? byte_tile_operations : NULL);
#else
  print_rate("int8_tile", NULL);
#endif
  printf("}\n");
  return 0;
}
