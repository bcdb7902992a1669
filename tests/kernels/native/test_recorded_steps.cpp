// Lists of calls, also those that run ahead, and calls from several threads at the same time.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
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
              kSize, kSize, 0, kSize, 1e-5f, 0.0f, 0, DType::kFloat32};
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
    require(pw_replay(replayed.calls.data(), num_calls, &progress, nullptr) == pagewick::kOk, "status");
    require(progress == 5 + static_cast<uint64_t>((step + 1) * num_calls), "progress");
    require(replayed.results == called.results, "a replay gives other bits than the calls");
    for (int64_t i = 0; i < kRows; ++i) require(replayed.chosen[i] == called.chosen[i], "chosen tokens");
  }
  require(pw_replay(replayed.calls.data(), 0, nullptr, nullptr) == pagewick::kOk, "no calls");

  // No call runs after the first that fails.
  Model::Run failing(model, token_ids);
  token_ids[2] = kVocabulary;
  require(pw_replay(failing.calls.data(), num_calls, nullptr, nullptr) == pagewick::kBadRow, "a bad row");
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
  require(pw_replay(expected.calls.data(), 6, nullptr, nullptr) == pagewick::kOk, "status");
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i)
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        Model::Run own(model, token_ids);
        require(pw_replay(own.calls.data(), 6, nullptr, nullptr) == pagewick::kOk, "status");
        require(own.results == expected.results, "other bits than alone");
      }
    });
  for (std::thread& caller : callers) caller.join();
}

// The inputs stay as they are.
constexpr NextInputs kSameInputs = {nullptr, 0, nullptr, 0};

// A stream: each step takes the tokens that the one before has chosen. Steps that run ahead give the same bits, wherever
// they are when the stream goes on.
void test_running_ahead() {
  begin_case("pw_resume");
  const Model model;
  constexpr int kSteps = 60;
  Array<int64_t> first_ids(kRows);
  for (int64_t i = 0; i < kRows; ++i) first_ids[i] = random_below(kVocabulary);
  Array<int64_t> token_ids(kRows);
  Model::Run expected(model, token_ids);
  const int64_t num_calls = static_cast<int64_t>(expected.calls.size());
  std::vector<std::vector<int64_t>> chosen;
  for (int step = 0; step < kSteps; ++step) {
    for (int64_t i = 0; i < kRows; ++i) token_ids[i] = step == 0 ? first_ids[i] : expected.chosen[i];
    require(pw_replay(expected.calls.data(), num_calls, nullptr, nullptr) == pagewick::kOk, "status");
    chosen.emplace_back(expected.chosen.data(), expected.chosen.data() + kRows);
  }

  for (const int threads : {1, 2, 3}) {
    pw_set_num_threads(threads);
    Array<int64_t> ids(kRows), positions(kRows), kept(kRows);
    Array<int32_t> lengths(5);
    for (int64_t i = 0; i < kRows; ++i) ids[i] = first_ids[i], positions[i] = (int64_t{1} << 40) + i;
    for (int64_t i = 0; i < lengths.size(); ++i) lengths[i] = static_cast<int32_t>(i) - 2;
    Model::Run ahead(model, ids);
    const pagewick::Copy copies[] = {{ahead.chosen.data(), kept.data(), kRows * 8},
                                     {ahead.chosen.data(), ids.data(), kRows * 8}};
    const pagewick::Increment increments[] = {{positions.data(), kRows, 8}, {lengths.data(), lengths.size(), 4}};
    const NextInputs next = {copies, 2, increments, 2};
    require(pw_replay(ahead.calls.data(), num_calls, nullptr, &next) == pagewick::kOk, "status");
    uint64_t num_resumed = 0;
    for (int step = 1; step < kSteps; ++step) {
      std::this_thread::sleep_for(std::chrono::microseconds(step == 7 ? 20000 : step % 4 * 100));
      for (int64_t i = 0; i < kRows; ++i) {
        require(kept[i] == chosen[static_cast<size_t>(step - 1)][static_cast<size_t>(i)], "the kept results");
        require(positions[i] == (int64_t{1} << 40) + i + step, "64-bit integers grow by one");
      }
      for (int64_t i = 0; i < lengths.size(); ++i) require(lengths[i] == i - 2 + step, "32-bit integers grow by one");
      const NextInputs* const following = step < kSteps - 1 ? &next : nullptr;
      require(pw_resume(ahead.calls.data(), num_calls, &num_resumed, following) == pagewick::kOk, "status");
    }
    require(ahead.results == expected.results, "a stream that runs ahead gives other bits");
    const uint64_t every = static_cast<uint64_t>((kSteps - 1) * num_calls);
    if (threads == 1) require(num_resumed == every, "nothing runs ahead without workers");
    else require(num_resumed < every, "no call has run ahead in any step");
  }
}

// Whatever comes between stops the replay that runs ahead, which then starts from its first call.
void test_stopping() {
  begin_case("a replay that runs ahead is stopped");
  pw_set_num_threads(2);
  const Model model;
  Array<int64_t> token_ids(kRows);
  for (int64_t i = 0; i < kRows; ++i) token_ids[i] = random_below(kVocabulary);
  Model::Run ahead(model, token_ids), other(model, token_ids);
  const auto run_ahead = [](const Model::Run& each) {
    require(pw_replay(each.calls.data(), 6, nullptr, &kSameInputs) == pagewick::kOk, "status");
  };
  const auto require_all_resumed = [&](const char* why) {
    uint64_t num_resumed = 0;
    require(pw_resume(ahead.calls.data(), 6, &num_resumed, nullptr) == pagewick::kOk, "status");
    require(num_resumed == 6, why);
    require(ahead.results == other.results, "a replay from the first call gives other bits");
  };
  run_ahead(other);
  pw_stop_ahead();
  require_all_resumed("nothing has run ahead");
  const Call& first = other.calls[0];
  run_ahead(ahead);
  require(pw_run(static_cast<int32_t>(first.operation), first.args) == pagewick::kOk, "status");
  require_all_resumed("an operation came between");
  run_ahead(ahead);
  require(pw_replay(other.calls.data(), 6, nullptr, nullptr) == pagewick::kOk, "status");
  require_all_resumed("a replay came between");
  run_ahead(ahead);
  run_ahead(other);
  require_all_resumed("another replay ran ahead");
  run_ahead(ahead);
  pw_stop_ahead();
  pw_stop_ahead();
  require_all_resumed("it was stopped");
  for (const int threads : {1, 4, 2}) {
    run_ahead(ahead);
    pw_set_num_threads(threads);
    require_all_resumed("the number of threads changed");
  }
}

void test_failing_ahead() {
  begin_case("a call that fails while it runs ahead");
  const Model model;
  Array<int64_t> token_ids(kRows), bad_ids(kRows);
  for (int64_t i = 0; i < kRows; ++i) bad_ids[i] = kVocabulary;
  pw_set_num_threads(2);
  for (const int wait_us : {0, 500}) {
    for (int64_t i = 0; i < kRows; ++i) token_ids[i] = i;
    Model::Run failing(model, token_ids);
    const pagewick::Copy copy = {bad_ids.data(), token_ids.data(), kRows * 8};
    const NextInputs next = {&copy, 1, nullptr, 0};
    require(pw_replay(failing.calls.data(), 6, nullptr, &next) == pagewick::kOk, "status");
    std::this_thread::sleep_for(std::chrono::microseconds(wait_us));
    uint64_t num_resumed = 0;
    require(pw_resume(failing.calls.data(), 6, &num_resumed, &next) == pagewick::kBadRow, "a bad row");
    require(num_resumed == 0, "a call after the one that failed was run");
    require(pw_resume(failing.calls.data(), 6, &num_resumed, nullptr) == pagewick::kBadRow, "and again");
  }
}

// One replay runs ahead at a time, and each thread gets its own results.
void test_running_ahead_from_several_threads() {
  begin_case("several threads run ahead at the same time");
  pw_set_num_threads(3);
  const Model model;
  Array<int64_t> token_ids(kRows);
  for (int64_t i = 0; i < kRows; ++i) token_ids[i] = i * 5;
  Model::Run expected(model, token_ids);
  require(pw_replay(expected.calls.data(), 6, nullptr, nullptr) == pagewick::kOk, "status");
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i)
    callers.emplace_back([&, i] {
      Model::Run own(model, token_ids);
      for (int repeat = 0; repeat < 20; ++repeat) {
        if (i == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
        const NextInputs* const next = repeat < 19 ? &kSameInputs : nullptr;
        require(pw_resume(own.calls.data(), 6, nullptr, next) == pagewick::kOk, "status");
      }
      require(own.results == expected.results, "other bits than alone");
    });
  for (std::thread& caller : callers) caller.join();
}

void require_child_ends(pid_t child) {
  require(child > 0, "fork");
  int status = -1;
  require(waitpid(child, &status, 0) == child && status == 0, "the child fails or hangs");
}

// A child process has no workers; it must not wait for them.
void test_fork_while_running_ahead() {
  begin_case("a child process");
  pw_set_num_threads(2);
  const Model model;
  Array<int64_t> token_ids(kRows);
  for (int64_t i = 0; i < kRows; ++i) token_ids[i] = i;
  Model::Run own(model, token_ids);
  constexpr unsigned kDeadlineS = 20;
  for (int repeat = 0; repeat < 5; ++repeat) {
    require(pw_replay(own.calls.data(), 6, nullptr, &kSameInputs) == pagewick::kOk, "status");
    const pid_t child = fork();
    if (child == 0) {
      alarm(kDeadlineS);
      for (int step = 0; step < 3; ++step)
        if (pw_resume(own.calls.data(), 6, nullptr, &kSameInputs) != pagewick::kOk) _exit(1);
      _exit(0);
    }
    require_child_ends(child);
  }

  // Another thread forks. The child uses the library without memory of its own, which the fork may find in disorder.
  std::atomic<bool> is_over{false};
  std::thread decoding([&] {
    while (!is_over)
      require(pw_resume(own.calls.data(), 6, nullptr, &kSameInputs) == pagewick::kOk, "status");
  });
  for (int repeat = 0; repeat < 30; ++repeat) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(kDeadlineS);
      pw_stop_ahead();
      _exit(0);
    }
    require_child_ends(child);
  }
  is_over = true;
  decoding.join();
  pw_stop_ahead();
}

}  // namespace

void test_recorded_steps() {
  test_replay();
  test_running_ahead();
  test_stopping();
  test_failing_ahead();
  test_running_ahead_from_several_threads();
  test_fork_while_running_ahead();
  test_concurrent_callers();
}
