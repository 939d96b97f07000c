/* The delta rule of recurrent_steps.c for one type of elements and one of states. */

/* Updates the state of one head, `[value_size][key_size]`, and writes its result. */
static void STATED(delta_head)(const NAME(Delta) *delta, int64_t segment, int64_t head) {
    const int64_t token = NAME(lone_token)(delta, segment);
    if (token < 0) return;
    const int64_t size = delta->key_size, value_size = delta->value_size;
    const int64_t group = head / (delta->num_heads / delta->num_key_heads) * size;
    float query[KEYS], key[KEYS], row[KEYS];
    NAME(unit)(delta->query + token * delta->query_stride + group, query, size, delta->scale);
    NAME(unit)(delta->key + token * delta->key_stride + group, key, size, 1.0f);
    float product = 0.0f;
    for (int64_t i = 0; i < size; i++) product += query[i] * key[i];
    const int64_t place = token * delta->num_heads + head;
    const float decay = expf(delta->log_decay[place]), beta = delta->beta[place];
    const ELEMENT *value = delta->value + token * delta->value_stride + head * value_size;
    ELEMENT *out = delta->out + place * value_size;
    STATE *state = (STATE *)delta->states + delta->rows[segment] * delta->row_stride +
                   head * value_size * size;
    for (int64_t v = 0; v < value_size; v++, state += size) {
        float kept = 0.0f, seen = 0.0f;
        for (int64_t i = 0; i < size; i++) {
            row[i] = ONE_STATE(state + i) * decay;
            kept += row[i] * key[i];
            seen += row[i] * query[i];
        }
        const float change = beta * (NAME(one)(value + v) - kept);
        for (int64_t i = 0; i < size; i++) STORE_STATE(state + i, row[i] + change * key[i]);
        NAME(store)(out + v, seen + change * product);
    }
    if (delta->z)
        NAME(gate_head)(
            out, delta->z + token * delta->z_stride + head * value_size, delta->weight, value_size,
            delta->eps);
}

/* Called by delta_step in recurrent_steps.py. */
void STATED(delta_step)(const NAME(Delta) *delta) {
    const int64_t num_items = delta->num_segments * delta->num_heads;
#pragma omp parallel for schedule(dynamic) if (num_items * delta->key_size * delta->value_size > MANY)
    for (int64_t item = 0; item < num_items; item++)
        STATED(delta_head)(delta, item / delta->num_heads, item % delta->num_heads);
}
