/* Writes the logits that llama.cpp or ik_llama.cpp computes for given tokens.
 *
 *   logits_llama MODEL THREADS VOCABULARY TOKENS NUM_LAST OUT
 *
 * TOKENS: a file of 32-bit ids. OUT: [2][NUM_LAST][VOCABULARY] floats, the logits of the last tokens: first as parts of
 * one prompt, then each of them in a step of its own after those before it. It is compiled with the headers of the
 * source tree whose libraries it is linked to; PW_IK: that tree is ik_llama.cpp's. PW_REPACK: it interleaves rows of
 * weights when it loads them.
 */
#include <stdio.h>
#include <stdlib.h>

#include "llama.h"

static struct llama_context* context;
static struct llama_batch batch;
static FILE* out;
static int vocabulary;

static int fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  exit(1);
}

/* Runs tokens [first, end), and writes the logits of those from `wanted` on. */
static void run(const int32_t* tokens, int first, int end, int wanted) {
  batch.n_tokens = end - first;
  for (int i = 0; i < batch.n_tokens; ++i) {
    batch.token[i] = tokens[first + i];
    batch.pos[i] = first + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = first + i >= wanted;
  }
  if (llama_decode(context, batch) != 0) fail("the tokens cannot be decoded");
  for (int i = 0; i < batch.n_tokens; ++i)
    if (batch.logits[i]) fwrite(llama_get_logits_ith(context, i), sizeof(float), (size_t)vocabulary, out);
}

static void keep_quiet(enum ggml_log_level level, const char* text, void* data) {
  (void)data;
  if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static void open_context(struct llama_model* model, int num_threads, int num_tokens) {
  struct llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = (uint32_t)num_tokens;
  params.n_threads = params.n_threads_batch = num_threads;
#ifdef PW_IK
  params.flash_attn = params.fused_moe_up_gate = params.fused_up_gate = params.fused_mmad = true;
#endif
  context = llama_init_from_model(model, params);
  if (context == NULL) fail("there is no room for a context");
}

int main(int argc, char** argv) {
  if (argc != 7) fail("usage: logits_llama MODEL THREADS VOCABULARY TOKENS NUM_LAST OUT");
  const int num_threads = atoi(argv[2]), num_last = atoi(argv[5]);
  vocabulary = atoi(argv[3]);
  static int32_t tokens[1 << 16];
  FILE* const source = fopen(argv[4], "rb");
  if (source == NULL) fail("the tokens cannot be read");
  const int num_tokens = (int)fread(tokens, sizeof *tokens, sizeof tokens / sizeof *tokens, source);
  out = fopen(argv[6], "wb");
  if (out == NULL || num_last > num_tokens) fail("the logits cannot be written");

  llama_log_set(keep_quiet, NULL);
  llama_backend_init();
  struct llama_model_params params = llama_model_default_params();
#ifdef PW_REPACK
  params.repack_tensors = true;
  params.use_mmap = false;
#endif
  struct llama_model* const model = llama_model_load_from_file(argv[1], params);
  if (model == NULL) fail("the model cannot be loaded");
  batch = llama_batch_init(num_tokens, 0, 1);
  open_context(model, num_threads, num_tokens);
  run(tokens, 0, num_tokens, num_tokens - num_last);
  llama_free(context);
  open_context(model, num_threads, num_tokens);
  run(tokens, 0, num_tokens - num_last, num_tokens);
  for (int i = num_tokens - num_last; i < num_tokens; ++i) run(tokens, i, i + 1, i);
  return fclose(out) == 0 ? 0 : fail("the logits cannot be written");
}
