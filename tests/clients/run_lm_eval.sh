#!/usr/bin/env -S bash -c 'exec "${0%/*}/run_all.sh" lm_eval'
# lm-evaluation-harness: its model local-completions with the tasks of lm_eval_tasks/, which need no download. Its results are then
# compared with those of Pagewick's Python API for the same texts.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$(cd "$here/../.." && pwd)/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The tasks name their data relative to here.
cd "$here/lm_eval_tasks"

evaluate() {  # NAME TASKS OPTIONS...: results and samples go to a folder NAME.
    local name=$1 tasks=$2
    shift 2
    local model="model=pagewick-demo,base_url=$PAGEWICK_URL/v1/completions,tokenizer=$PAGEWICK_MODEL_DIR,tokenizer_backend=huggingface"
    OPENAI_API_KEY=$PAGEWICK_KEY HF_HOME=$work/hub lm_eval run --model local-completions \
        --model_args "$model,max_length=2048,num_concurrent=3" --batch_size 2 --include_path . --tasks "$tasks" \
        --output_path "$work/$name" --log_samples "$@" > "$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
}

evaluate plain pagewick_likelihood,pagewick_rolling
evaluate chat pagewick_answers,pagewick_choices --apply_chat_template
OMP_NUM_THREADS=1 PYTHONPATH=$here/../.. "$python" "$here/lm_eval_agreement.py" "$work"
