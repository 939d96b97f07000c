/* The rules of recurrent_steps.c for one type of elements and one of states. */

/* Writes the result of a token and head, and updates its state, `[value_size][key_size]`. */
static void STATED(pass_token)(
    const NAME(Rule) *rule, int64_t token, int64_t head, STATE *state) {
    const int64_t size = rule->key_size, value_size = rule->value_size;
    const int64_t group = head / (rule->num_heads / rule->num_key_heads) * size;
    float query[KEYS], key[KEYS], row[KEYS];
    const int is_delta = !rule->skip;
    NAME(copy_unit)(
        rule->query + token * rule->query_stride + group, query, size, rule->scale, is_delta);
    NAME(copy_unit)(rule->key + token * rule->key_stride + group, key, size, 1.0f, is_delta);
    float product = 0.0f;
    for (int64_t i = 0; i < size; i++) product += query[i] * key[i];
    const int64_t place = token * rule->num_heads + head;
    const float decay = expf(rule->log_decay[place]), beta = rule->beta[place];
    const float skip = is_delta ? 0.0f : rule->skip[head];
    const ELEMENT *value = rule->value + token * rule->value_stride + head * value_size;
    ELEMENT *out = rule->out + place * value_size;
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
    if (rule->z)
        NAME(gate_head)(
            out, rule->z + token * rule->z_stride + head * value_size, rule->weight, value_size,
            rule->eps);
}

/* Writes the results of the tokens from `first` to `end` of one head, and updates its state. */
static void STATED(pass_chunks)(
    const NAME(Rule) *rule, int64_t first, int64_t end, int64_t head, STATE *state, Scratch *with) {
    const int64_t size = rule->key_size, value_size = rule->value_size, values = with->values;
    for (int64_t v = 0; v < value_size; v++)
        for (int64_t i = 0; i < size; i++)
            with->state[i * values + v] = ONE_STATE(state + v * size + i);
    for (int64_t token = first; token < end; token += CHUNK) {
        const int64_t count = end - token < CHUNK ? end - token : CHUNK;
        NAME(load_chunk)(rule, token, head, count, with);
        NAME(pass_chunk)(rule, count, with);
        NAME(store_chunk)(rule, token, head, count, with);
        /* As where a segment ends, so that results do not depend on the ends. */
        for (int64_t v = 0; v < value_size; v++)
            for (int64_t i = 0; i < size; i++) {
                STATE *one = state + v * size + i;
                STORE_STATE(one, with->state[i * values + v]);
                with->state[i * values + v] = ONE_STATE(one);
            }
    }
}

/* Called by _rule in recurrent_steps.py. */
void STATED(rule)(const NAME(Rule) *rule) {
    const int64_t num_items = rule->num_segments * rule->num_heads;
    const int64_t state_size = rule->key_size * rule->value_size;
#pragma omp parallel if (num_items * state_size > MANY)
    {
        Scratch *scratch = 0;
        STATE *copy = 0;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < num_items; item++) {
            const int64_t segment = item / rule->num_heads, head = item % rule->num_heads;
            const int64_t first = rule->query_starts[segment];
            const int64_t end = rule->query_starts[segment + 1];
            if (rule->rows[segment] < 0 || first >= end) continue;
            STATE *state = (STATE *)rule->states + rule->rows[segment] * rule->row_stride +
                           head * state_size;
            if (rule->keeps_states) {
                const size_t num_bytes = state_size * sizeof(STATE);
                if (!copy && !(copy = malloc(num_bytes))) abort();
                state = memcpy(copy, state, num_bytes);
            }
            if (rule->is_chained) {
                for (int64_t token = first; token < end; token++)
                    STATED(pass_token)(rule, token, head, state);
                continue;
            }
            const int64_t is_last_alone = (end - first) % CHUNK == 1;
            if (end - is_last_alone > first) {
                if (!scratch) scratch = make_scratch(rule->key_size, rule->value_size);
                STATED(pass_chunks)(rule, first, end - is_last_alone, head, state, scratch);
            }
            if (is_last_alone) STATED(pass_token)(rule, end - 1, head, state);
        }
        free(scratch);
        free(copy);
    }
}
