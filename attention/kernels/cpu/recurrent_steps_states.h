/* The steps of recurrent_steps.c for one type of elements and one of states. */

/* Updates the state of one head, `[value_size][key_size]`, and writes its result. */
static void STATED(step_head)(const NAME(Rule) *step, int64_t segment, int64_t head) {
    const int64_t token = NAME(lone_token)(step, segment);
    if (token < 0) return;
    const int64_t size = step->key_size, value_size = step->value_size;
    const int64_t group = head / (step->num_heads / step->num_key_heads) * size;
    float query[KEYS], key[KEYS], row[KEYS];
    const int is_delta = !step->skip;
    NAME(copy_unit)(
        step->query + token * step->query_stride + group, query, size, step->scale, is_delta);
    NAME(copy_unit)(step->key + token * step->key_stride + group, key, size, 1.0f, is_delta);
    float product = 0.0f;
    for (int64_t i = 0; i < size; i++) product += query[i] * key[i];
    const int64_t place = token * step->num_heads + head;
    const float decay = expf(step->log_decay[place]), beta = step->beta[place];
    const float skip = is_delta ? 0.0f : step->skip[head];
    const ELEMENT *value = step->value + token * step->value_stride + head * value_size;
    ELEMENT *out = step->out + place * value_size;
    STATE *state = (STATE *)step->states + step->rows[segment] * step->row_stride +
                   head * value_size * size;
    for (int64_t v = 0; v < value_size; v++, state += size) {
        float kept = 0.0f, seen = 0.0f;
        for (int64_t i = 0; i < size; i++) {
            row[i] = ONE_STATE(state + i) * decay;
            kept += row[i] * key[i];
            seen += row[i] * query[i];
        }
        const float input = NAME(one)(value + v);
        const float change = beta * (is_delta ? input - kept : input);
        for (int64_t i = 0; i < size; i++) STORE_STATE(state + i, row[i] + change * key[i]);
        seen += change * product;
        NAME(store)(out + v, is_delta ? seen : seen + skip * input);
    }
    if (step->z)
        NAME(gate_head)(
            out, step->z + token * step->z_stride + head * value_size, step->weight, value_size,
            step->eps);
}

/* Called by _step in recurrent_steps.py. */
void STATED(step)(const NAME(Rule) *step) {
    const int64_t num_items = step->num_segments * step->num_heads;
#pragma omp parallel for schedule(dynamic) if (num_items * step->key_size * step->value_size > MANY)
    for (int64_t item = 0; item < num_items; item++)
        STATED(step_head)(step, item / step->num_heads, item % step->num_heads);
}
