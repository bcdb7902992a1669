// Shared by the tests of the library's C ABI: memory of exactly the wanted size, numbers of the three element types,
// comparisons with doubles, and calls on different numbers of threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include "kernels.h"
#include "replay.h"

using pagewick::Call;
using pagewick::NextInputs;

extern "C" {
int32_t pw_abi_version();
const char* pw_isa();
int32_t pw_select_isa(const char* name);
void pw_set_num_threads(int32_t count);
int32_t pw_num_threads();
int32_t pw_operation(const char* name);
int32_t pw_run(int32_t operation, const void* args);
int32_t pw_replay(const Call* calls, int64_t num_calls, volatile uint64_t* progress, const NextInputs* next);
int32_t pw_resume(const Call* calls, int64_t num_calls, volatile uint64_t* progress, const NextInputs* next);
void pw_stop_ahead();
}

namespace testing {

using pagewick::DType;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

const char* name_of(DType dtype);

// Sets the name of the case that is being tested, for the message of a failure.
void begin_case(const char* format, ...) __attribute__((format(printf, 1, 2)));
int64_t num_cases();

// Unless `condition` holds, prints the case and `what` and ends the program.
void require(bool condition, const char* what);

// Memory between two protected pages, flush with the second: reading or writing one byte too far kills the program. All
// bytes are 0xff, which is NaN as a float of any size and -1 as an integer. So are the bytes before the memory, up to
// the first page; they must still be 0xff at the end.
class Memory {
 public:
  explicit Memory(size_t num_bytes);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&&) = delete;

  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* pages_;
  char* data_;
  size_t size_, mapped_;
};

// Numbers of type T.
template <class T>
class Array {
 public:
  explicit Array(int64_t size) : memory_(static_cast<size_t>(size) * sizeof(T)) {}
  Array(const std::vector<T>& values) : Array(static_cast<int64_t>(values.size())) {
    if (!values.empty()) std::memcpy(memory_.data(), values.data(), memory_.size());
  }
  Array(std::initializer_list<T> values) : Array(std::vector<T>(values)) {}

  T* data() const { return static_cast<T*>(memory_.data()); }
  int64_t size() const { return static_cast<int64_t>(memory_.size() / sizeof(T)); }
  T& operator[](int64_t i) const { return data()[i]; }

 private:
  Memory memory_;
};

// Elements of a type that is known at run time, read and written as doubles.
class Tensor {
 public:
  // NaN everywhere.
  Tensor(DType dtype, int64_t size);

  static Tensor random(DType dtype, int64_t size, double scale = 1.0);

  double operator[](int64_t i) const;
  void set(int64_t i, double value);  // rounded to the nearest, ties to even
  uint32_t bits(int64_t i) const;
  void set_bits(int64_t i, uint32_t bits);
  bool is_untouched(int64_t i) const;

  DType dtype() const { return dtype_; }
  int64_t size() const { return size_; }
  void* data() const { return memory_.data(); }
  const float* floats() const { return static_cast<const float*>(memory_.data()); }
  bool operator==(const Tensor& other) const;  // the same bits

 private:
  DType dtype_;
  int64_t size_;
  Memory memory_;
};

int64_t element_size(DType dtype);

// The nearest number of the type, ties to even; infinite beyond the largest.
double rounded(DType dtype, double value);

double random_number();                          // in [-1, 1)
int64_t random_below(int64_t limit);

// Requires that `actual` is some number within `error` of `expected`, rounded to dtype, or NaN if NaN is expected.
void require_near(DType dtype, double actual, double expected, double error, const char* what);
inline void require_near(const Tensor& tensor, int64_t i, double expected, double error, const char* what) {
  require_near(tensor.dtype(), tensor[i], expected, error, what);
}

constexpr double kFloatUnit = 0x1p-24;  // half a unit in the last place of a float32 in [1, 2)

int32_t operation(const char* name);

template <class Args>
int32_t status_of(const char* name, const Args& args) {
  return pw_run(operation(name), &args);
}

template <class Args>
void run(const char* name, const Args& args) {
  require(status_of(name, args) == pagewick::kOk, "status");
}

using Outputs = std::vector<Tensor>;

// Returns the result of `compute` on one thread whose scratch memory is new, so that the sanitizer knows its end. On 1,
// 2 and 3 threads with used scratch memory the result must have the same bits.
Outputs on_all_threads(const std::function<Outputs()>& compute);
inline Tensor tensor_on_all_threads(const std::function<Tensor()>& compute) {
  return std::move(on_all_threads([&] {
    Outputs outputs;
    outputs.push_back(compute());
    return outputs;
  })[0]);
}

}  // namespace testing

// The tests of each family. They use the instruction set that is selected.
void test_convert();
void test_norm();
void test_matrix();
void test_quantized();
void test_rope();
void test_activation();
void test_elementwise();
void test_attention();
void test_kv_bytes();
void test_logits();
void test_mla();
void test_index();
void test_delta();
void test_scan();
void test_channel_scan();
void test_convolution();
void test_moe();
void test_streams();
void test_hyper();
void test_compressed();
void test_window();
void test_recorded_steps();
