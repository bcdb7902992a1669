// Lists of calls, and calls from several threads at the same time.
#include <thread>

#include "activation.h"
#include "logits.h"
#include "matrix.h"
#include "norm.h"
#include "testing.h"

using namespace testing;

namespace {

constexpr int64_t kRows = 7, kSize = 96, kVocabulary = 200;

// A small model: embedding, norm, product, gate, logits, choice of a token.
class Model {
 public:
  Model()
      : embedding_(Tensor::random(DType::kFloat32, kVocabulary * kSize)),
        norm_(Tensor::random(DType::kFloat32, kSize)),
        weight_(pack(2 * kSize)),
        head_(pack(kVocabulary)) {}

  // The memory of one run, and the arguments that point into it.
  struct Run {
    explicit Run(const Model& model, const Array<int64_t>& token_ids)
        : chosen(kRows) {
      for (const int64_t size : {kSize, kSize, 2 * kSize, kSize, kVocabulary})
        results.emplace_back(DType::kFloat32, kRows * size);
      gather = {model.embedding_.data(), token_ids.data(), results[0].data(), kRows, kVocabulary, kSize,
                DType::kFloat32, 0};
      norm = {results[0].data(), nullptr, model.norm_.data(), nullptr, results[1].data(), nullptr, kRows,
              kSize, kSize, 0, 1e-5f, 0.0f, DType::kFloat32};
      product = {results[1].data(), model.weight_.data(), nullptr, results[2].data(), kRows, 2 * kSize, kSize, kSize,
                 2 * kSize, DType::kFloat32, DType::kFloat32};
      gate = {results[2].data(), results[3].data(), kRows, kSize, 2 * kSize, DType::kFloat32,
              pagewick::Activation::kSilu, 1};
      logits = {results[3].data(), model.head_.data(), nullptr, results[4].data(), kRows, kVocabulary, kSize, kSize,
                kVocabulary, DType::kFloat32, DType::kFloat32};
      choice = {results[4].floats(), chosen.data(), nullptr, kRows, kVocabulary, kVocabulary};
      calls = {{operation("gather_rows"), &gather}, {operation("rms_norm"), &norm}, {operation("linear"), &product},
               {operation("activation"), &gate},    {operation("linear"), &logits}, {operation("argmax_rows"), &choice}};
    }
    Run(const Run&) = delete;

    Outputs results;
    Array<int64_t> chosen;
    pagewick::GatherArgs gather;
    pagewick::NormArgs norm;
    pagewick::LinearArgs product, logits;
    pagewick::ActivationArgs gate;
    pagewick::ArgmaxArgs choice;
    std::vector<Call> calls;
  };

 private:
  static Tensor pack(int64_t num_rows) {
    const Tensor weight = Tensor::random(DType::kFloat32, num_rows * kSize);
    Tensor packed(DType::kFloat32, (num_rows + 63) / 64 * 64 * kSize);
    for (int64_t i = 0; i < packed.size(); ++i) packed.set(i, 0);
    run("pack_rows", pagewick::PackArgs{weight.data(), packed.data(), 0, num_rows, kSize, kSize, DType::kFloat32});
    return packed;
  }

  Tensor embedding_, norm_, weight_, head_;
};

void test_replay() {
  begin_case("pw_replay");
  require(pw_operation("no_such_operation") == -1, "an operation that is not there");
  const Model model;
  Array<int64_t> token_ids(kRows);
  Model::Run replayed(model, token_ids), called(model, token_ids);
  const int64_t num_calls = static_cast<int64_t>(replayed.calls.size());
  uint64_t progress = 5;
  for (int step = 0; step < 3; ++step) {
    pw_set_num_threads(step + 1);
    for (int64_t i = 0; i < kRows; ++i) token_ids[i] = random_below(kVocabulary);
    for (const Call& call : called.calls)
      require(pw_run(static_cast<int32_t>(call.operation), call.args) == pagewick::kOk, "status");
    require(pw_replay(replayed.calls.data(), num_calls, &progress) == pagewick::kOk, "status");
    require(progress == 5 + static_cast<uint64_t>((step + 1) * num_calls), "progress");
    require(replayed.results == called.results, "a replay gives other bits than the calls");
    for (int64_t i = 0; i < kRows; ++i) require(replayed.chosen[i] == called.chosen[i], "chosen tokens");
  }
  require(pw_replay(replayed.calls.data(), 0, nullptr) == pagewick::kOk, "no calls");

  // No call runs after the first that fails.
  Model::Run failing(model, token_ids);
  token_ids[2] = kVocabulary;
  require(pw_replay(failing.calls.data(), num_calls, nullptr) == pagewick::kBadRow, "a bad row");
  for (int64_t i = 0; i < failing.results[1].size(); ++i)
    require(failing.results[1].is_untouched(i), "a call after the one that failed was run");
}

// A caller that finds the pool occupied does its work alone.
void test_concurrent_callers() {
  begin_case("several threads call at the same time");
  pw_set_num_threads(3);
  require(pw_num_threads() == 3, "the number of threads");
  const Model model;
  Array<int64_t> token_ids(kRows);
  for (int64_t i = 0; i < kRows; ++i) token_ids[i] = i * 3;
  Model::Run expected(model, token_ids);
  require(pw_replay(expected.calls.data(), 6, nullptr) == pagewick::kOk, "status");
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i)
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        Model::Run own(model, token_ids);
        require(pw_replay(own.calls.data(), 6, nullptr) == pagewick::kOk, "status");
        require(own.results == expected.results, "other bits than alone");
      }
    });
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

void test_recorded_steps() {
  test_replay();
  test_concurrent_callers();
}
