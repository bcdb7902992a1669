#!/usr/bin/env -S bash -c 'exec "${0%/*}/run_all.sh" llm'
# LLM, Simon Willison's command line: a chat model and a completion model of its extra-openai-models.yaml.
set -euo pipefail

LLM_USER_PATH=$(mktemp -d)
export LLM_USER_PATH
trap 'rm -rf "$LLM_USER_PATH"' EXIT

cat > "$LLM_USER_PATH/extra-openai-models.yaml" << YAML
- model_id: pagewick
  model_name: pagewick-demo
  api_base: $PAGEWICK_URL/v1
  api_key_name: pagewick
  supports_tools: true
  supports_schema: true
- model_id: pagewick-base
  model_name: pagewick-demo
  api_base: $PAGEWICK_URL/v1
  api_key_name: pagewick
  completion: true
- model_id: pagewick-unknown
  model_name: none
  api_base: $PAGEWICK_URL/v1
  api_key_name: pagewick
YAML
llm keys set pagewick --value "$PAGEWICK_KEY"

question="How do I change the port?"
failed=0

check() {  # WHAT WANTED SEEN
    if [ "$2" = "$3" ]; then
        echo "  $1"
    else
        printf '  FAILED: %s: %q instead of %q\n' "$1" "$3" "$2"
        failed=1
    fi
}

check_contains() {  # WHAT WANTED SEEN
    case $3 in
        *"$2"*) echo "  $1" ;;
        *) printf '  FAILED: %s: %q, without %q\n' "$1" "$3" "$2"; failed=1 ;;
    esac
}

check_fails() {  # WHAT WORDS COMMAND...: the command must fail, with these words in the line of its error.
    local what=$1 words=$2 said
    shift 2
    if said=$("$@" 2>&1); then
        printf '  FAILED: %s: %q instead of an error\n' "$what" "$said"
        failed=1
    else
        check_contains "$what: an error" "$words" "$(grep '^Error: ' <<< "$said")"
    fi
}

# plainly PATH BODY JSON-PATH: print a part of the likeliest response over plain HTTP; JSON-PATH is like choices.0.text.
plainly() {
    python - "$@" << 'PYTHON'
import json, os, sys, urllib.request

path, body, wanted = sys.argv[1:]
headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['PAGEWICK_KEY']}"}
body = {"model": "pagewick-demo", "temperature": 0, **json.loads(body)}
request = urllib.request.Request(os.environ["PAGEWICK_URL"] + path, json.dumps(body).encode(), headers)
value = json.load(urllib.request.urlopen(request, timeout=60))
for name in wanted.split("."):
    value = value[int(name) if name.isdigit() else name]
print(value)
PYTHON
}

ask() {
    llm prompt --no-log -m pagewick -o temperature 0 "$@" 2>&1
}

asked() {  # What is in a response over plain HTTP to the question, after a system message if one is given.
    local system=${2:+"{\"role\": \"system\", \"content\": \"$2\"}, "}
    plainly /v1/chat/completions "{\"messages\": [${system:-}{\"role\": \"user\", \"content\": \"$question\"}]}" "$1"
}

content=choices.0.message.content
response=$(asked $content)
check "models are listed" 3 "$(llm models list | grep -c pagewick)"
check_contains "the response knows its port" 8000 "$response"
check "chat, streamed" "$response" "$(ask "$question")"
check "chat, not streamed" "$response" "$(ask --no-stream "$question")"
check "async, streamed" "$response" "$(ask --async "$question")"
check "async, not streamed" "$response" "$(ask --async --no-stream "$question")"
check "the question on stdin" "$response" "$(echo -n "$question" | ask)"
system="You are a helpful assistant."
check "system message" "$(asked $content "$system")" "$(ask -s "$system" "$question")"
before=${response%%8000*}
check "stop" "${before% }" "$(ask -o stop 8000 "$question" | sed 's/ *$//')"
check "max_tokens" 3 "$(ask -o max_tokens 3 --usage "$question" | sed -nE 's/.* ([0-9]+) output.*/\1/p')"
tokens="$(asked usage.prompt_tokens) input, $(asked usage.completion_tokens) output"
check_contains "usage of a stream" "$tokens" "$(ask --usage "$question")"
check_contains "usage" "$tokens" "$(ask --no-stream --usage "$question")"
check "seed" "$(ask -o temperature 1 -o seed 5 "$question")" "$(ask -o temperature 1 -o seed 5 "$question")"

# A conversation, which LLM keeps in its own database.
first=$(llm prompt -m pagewick -o temperature 0 "What is Pagewick?")
turns=$(python -c 'import json, sys; print(json.dumps({"messages": [
    {"role": role, "content": text} for role, text in zip(["user", "assistant", "user"], sys.argv[1:])]}))' \
    "What is Pagewick?" "$first" "$question")
check "several turns" "$(plainly /v1/chat/completions "$turns" $content)" "$(llm prompt -c -o temperature 0 "$question")"
logged() {
    llm logs -n 1 --json | python -c "import json, sys; print(json.load(sys.stdin)[0]['$1'])"
}
check "tokens of several turns" "$(plainly /v1/chat/completions "$turns" usage.prompt_tokens)" "$(logged input_tokens)"

# Tools: LLM runs those that the model calls, and sends back their results.
cat > "$LLM_USER_PATH/tools.py" << PYTHON
def get_weather(city: str) -> dict:
    "Get the weather of a city."
    return _ran("get_weather", city, {"condition": "sunny", "temperature": 21})

def add(a: int, b: int) -> dict:
    "Add two numbers."
    return _ran("add", f"{a} {b}", {"sum": a + b})

def _ran(name: str, arguments: str, result: dict) -> dict:
    with open("$LLM_USER_PATH/ran", "a") as log:
        print(name, arguments, file=log)
    return result
PYTHON

for how in "" --no-stream --async; do
    rm -f "$LLM_USER_PATH/ran"
    said=$(ask -o max_tokens 100 ${how:+$how} --functions "$LLM_USER_PATH/tools.py" "what is the weather in Rome?")
    check_contains "a tool${how:+, $how}: the response has the result" 21 "$said"
    said=$(ask -o max_tokens 100 ${how:+$how} --functions "$LLM_USER_PATH/tools.py" "what is 2 plus 3?")
    check_contains "another tool${how:+, $how}: the response has the result" 5 "$said"
    check "both calls${how:+, $how}" "get_weather Rome;add 2 3;" "$(tr '\n' ';' < "$LLM_USER_PATH/ran")"
    said=$(ask -o max_tokens 100 ${how:+$how} --schema 'port int, is_open bool' "$question")
    check "structured output${how:+, $how}" "is_open port" \
        "$(python -c 'import json, sys; print(*sorted(json.loads(sys.argv[1])))' "$said")"
done

completion=$(plainly /v1/completions '{"prompt": "Pagewick is", "max_tokens": 6}' choices.0.text)
base=(llm prompt --no-log -m pagewick-base -o temperature 0 -o max_tokens 6)
check "text completion, streamed" "$completion" "$("${base[@]}" "Pagewick is")"
check "text completion" "$completion" "$("${base[@]}" --no-stream "Pagewick is")"
llm prompt --log -m pagewick-base -o temperature 0 -o logprobs 2 -o max_tokens 2 "Pagewick is" > /dev/null
check_contains "logprobs" "'top_logprobs'" "$(logged response_json)"

check_fails "an unknown model" "does not exist" llm prompt --no-log -m pagewick-unknown "$question"
check_fails "a wrong key" "401" ask --key another-key "$question"
check_fails "a prompt too long" "2048 tokens" ask "$(printf 'word %.0s' {1..3000})"
check_fails "a response too long" "lower max_tokens" ask -o max_tokens 5000 "$question"
exit $failed
