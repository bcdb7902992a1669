#include "testing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <thread>

namespace testing {
namespace {

char current_case[400] = "nothing";
int64_t case_count = 0;
uint64_t random_state = 1;

uint32_t next_random() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(random_state >> 32);
}

// The bits of the significand, the one before the point included, and the exponents of the smallest normal and the
// largest number.
struct Format {
  int precision, min_exponent, max_exponent;
};

Format format_of(DType dtype) {
  if (dtype == DType::kBFloat16) return {8, -126, 127};
  if (dtype == DType::kFloat16) return {11, -14, 15};
  return {24, -126, 127};
}

// These two do what ldexp(1.0, exponent) and ilogb(value) do for normal doubles. The tests need them for every number
// that they compare, and most of their time would be spent in those functions under an emulator.
double power_of_two(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

// Returns -1023 for 0 and for subnormal doubles.
int exponent_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<int>(bits >> 52 & 0x7ff) - 1023;
}

double decode_half(uint32_t bits) {
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return fraction == 0 ? sign * HUGE_VAL : std::nan("");
  return sign * (exponent == 0 ? fraction * 0x1p-24 : (fraction + 1024) * power_of_two(exponent - 25));
}

// value: a half, infinite or NaN.
uint32_t encode_half(double value) {
  const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(value);
  if (std::isnan(value)) return 0x7e00;
  if (std::isinf(value)) return sign | 0x7c00;
  if (magnitude < 0x1p-14) return sign | static_cast<uint32_t>(magnitude * 0x1p24);
  const int exponent = exponent_of(magnitude);
  return sign | static_cast<uint32_t>(exponent + 15) << 10 |
         static_cast<uint32_t>(magnitude * power_of_two(10 - exponent) - 1024);
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace

const char* name_of(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}

void begin_case(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(current_case, sizeof(current_case), format, arguments);
  va_end(arguments);
  ++case_count;
}

int64_t num_cases() { return case_count; }

void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("failed with %s: %s: %s\n", pw_isa(), current_case, what);
  std::fflush(stdout);
  std::_Exit(1);
}

Memory::Memory(size_t num_bytes) : size_(num_bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  mapped_ = (num_bytes + page - 1) / page * page + 2 * page;
  pages_ = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  require(pages_ != MAP_FAILED, "out of memory");
  char* const first = static_cast<char*>(pages_) + page;
  const size_t usable = mapped_ - 2 * page;
  if (usable > 0) {
    require(mprotect(first, usable, PROT_READ | PROT_WRITE) == 0, "mprotect");
    std::memset(first, 0xff, usable);
  }
  data_ = first + usable - num_bytes;
}

Memory::~Memory() {
  if (pages_ == nullptr) return;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const char* const first = static_cast<char*>(pages_) + page;
  const size_t before = static_cast<size_t>(data_ - first);
  if (before > 0)
    require(*first == '\xff' && std::memcmp(first, first + 1, before - 1) == 0, "memory before a tensor was written to");
  munmap(pages_, mapped_);
}

Memory::Memory(Memory&& other) noexcept
    : pages_(std::exchange(other.pages_, nullptr)), data_(other.data_), size_(other.size_), mapped_(other.mapped_) {}

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

Tensor::Tensor(DType dtype, int64_t size)
    : dtype_(dtype), size_(size), memory_(static_cast<size_t>(size * element_size(dtype))) {}

Tensor Tensor::random(DType dtype, int64_t size, double scale) {
  Tensor tensor(dtype, size);
  for (int64_t i = 0; i < size; ++i) tensor.set(i, random_number() * scale);
  return tensor;
}

uint32_t Tensor::bits(int64_t i) const {
  if (dtype_ == DType::kFloat32) return static_cast<const uint32_t*>(data())[i];
  return static_cast<const uint16_t*>(data())[i];
}

void Tensor::set_bits(int64_t i, uint32_t bits) {
  if (dtype_ == DType::kFloat32) static_cast<uint32_t*>(data())[i] = bits;
  else static_cast<uint16_t*>(data())[i] = static_cast<uint16_t>(bits);
}

double Tensor::operator[](int64_t i) const {
  if (dtype_ == DType::kFloat16) return decode_half(bits(i));
  return float_of(dtype_ == DType::kBFloat16 ? bits(i) << 16 : bits(i));
}

void Tensor::set(int64_t i, double value) {
  const double nearest = rounded(dtype_, value);
  if (dtype_ == DType::kFloat16) return set_bits(i, encode_half(nearest));
  const uint32_t bits = bits_of(static_cast<float>(nearest));
  set_bits(i, dtype_ == DType::kBFloat16 ? bits >> 16 : bits);
}

bool Tensor::is_untouched(int64_t i) const { return bits(i) == (dtype_ == DType::kFloat32 ? 0xffffffff : 0xffff); }

bool Tensor::operator==(const Tensor& other) const {
  return dtype_ == other.dtype_ && size_ == other.size_ && std::memcmp(data(), other.data(), memory_.size()) == 0;
}

double rounded(DType dtype, double value) {
  if (std::isnan(value) || std::isinf(value) || value == 0.0) return value;
  const Format format = format_of(dtype);
  const int exponent = std::max(exponent_of(value), format.min_exponent) - format.precision + 1;
  // The sum with kRounder has no bits for fractions: it is rounded to the nearest whole number, ties to even.
  constexpr double kRounder = 0x1.8p52;
  const double units = value * power_of_two(-exponent) + kRounder;
  const double nearest = (units - kRounder) * power_of_two(exponent);
  if (std::abs(nearest) < power_of_two(format.max_exponent + 1)) return std::copysign(nearest, value);
  return std::copysign(HUGE_VAL, value);
}

double random_number() { return next_random() * 0x1p-31 - 1.0; }

int64_t random_below(int64_t limit) { return next_random() % limit; }

void require_near(DType dtype, double actual, double expected, double error, const char* what) {
  const double low = expected - error, high = expected + error;
  // Rounding keeps the order, and `actual` is a number of the type.
  if (low <= actual && actual <= high) return;
  const bool is_near = std::isnan(expected) ? std::isnan(actual)
                                            : rounded(dtype, low) <= actual && actual <= rounded(dtype, high);
  if (is_near) return;
  char message[200];
  std::snprintf(message, sizeof(message), "%s: %.9g instead of %.9g (within %.3g)", what, actual, expected, error);
  require(false, message);
}

int32_t operation(const char* name) {
  const int32_t number = pw_operation(name);
  require(number >= 0, name);
  return number;
}

Outputs on_all_threads(const std::function<Outputs()>& compute) {
  Outputs first;
  pw_set_num_threads(1);
  std::thread([&] { first = compute(); }).join();
  for (const int32_t threads : {1, 2, 3}) {
    pw_set_num_threads(threads);
    const Outputs again = compute();
    require(again == first, threads == 1 ? "used scratch memory changes bits" : "more threads change bits");
  }
  return first;
}

}  // namespace testing
