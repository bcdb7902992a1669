// Conversions between the element types, tested through store_kv: every fp16 and bf16 number, and floats around every
// border that rounding has.
#include <cmath>

#include "attention.h"
#include "packed.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr int64_t kDim = 256, kBlockSize = 32;

// All bit patterns of a 16-bit type.
Tensor all_halves(DType dtype) {
  Tensor tensor(dtype, 1 << 16);
  for (int64_t i = 0; i < tensor.size(); ++i) tensor.set_bits(i, static_cast<uint32_t>(i));
  return tensor;
}

// Every exponent with the fractions at which rounding to 7 or 10 bits changes direction, and their neighbours, with
// both signs. Random numbers fill the rest.
Tensor telling_floats() {
  Tensor tensor(DType::kFloat32, 1 << 16);
  int64_t i = 0;
  for (uint32_t exponent = 0; exponent < 256; ++exponent)
    for (const uint32_t fraction : {0x0u, 0x7fffffu, 0x8000u, 0x18000u, 0x1000u, 0x3000u, 0x7f8000u, 0x7ff000u})
      for (const uint32_t step : {0u, 1u, 0xffffffffu})
        for (const uint32_t sign : {0u, 0x80000000u})
          tensor.set_bits(i++, sign | (((exponent << 23 | fraction) + step) & 0x7fffffff));
  for (; i < tensor.size(); ++i)
    tensor.set_bits(i, static_cast<uint32_t>(random_below(1 << 16)) << 16 | static_cast<uint32_t>(random_below(1 << 16)));
  return tensor;
}

void test_conversion(const Tensor& source, DType target) {
  begin_case("%s to %s", name_of(source.dtype()), name_of(target));
  const int64_t num_tokens = source.size() / kDim;
  Array<int64_t> slots(num_tokens);
  for (int64_t token = 0; token < num_tokens; ++token) slots[token] = token;
  const Tensor cache = tensor_on_all_threads([&] {
    Tensor out(target, num_tokens * 2 * kDim);
    pagewick::StoreKvArgs args = {};
    args.k = source.data(), args.v = source.data(), args.slot_mapping = slots.data(), args.kv_cache = out.data();
    args.num_tokens = num_tokens, args.num_kv_heads = 1, args.head_dim = kDim;
    args.num_blocks = num_tokens / kBlockSize, args.block_size = kBlockSize;
    args.k_stride = args.v_stride = kDim, args.dtype = source.dtype(), args.kv_dtype = target;
    run("store_kv", args);
    return out;
  });
  const Packed packed = {target, 1, kDim, kBlockSize};
  for (int64_t token = 0; token < num_tokens; ++token)
    for (int64_t d = 0; d < kDim; ++d) {
      const double expected = rounded(target, source[token * kDim + d]);
      for (const int64_t index : {packed.key(token, 0, d), packed.value(token, 0, d)}) {
        require_near(cache, index, expected, 0.0, "value");
        require(std::isnan(expected) || std::signbit(cache[index]) == std::signbit(expected), "sign");
      }
    }
}

}  // namespace

void test_convert() {
  for (const DType target : kDTypes) {
    test_conversion(telling_floats(), target);
    test_conversion(all_halves(DType::kBFloat16), target);
    test_conversion(all_halves(DType::kFloat16), target);
  }
}
