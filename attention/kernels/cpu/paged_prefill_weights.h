/* The step of an online softmax: from the scores of KEYS keys to their weights. */

/* The rows and keys of a step. Both are counted from the first ones of the work item and the step. */
typedef struct {
    int64_t first_row, stop_row; /* the others see none of the keys */
    int64_t heads;               /* rows of a query */
    int64_t position;            /* of the first query, from the first key on */
} Step;

/* Caps, biases and hides scores of a row as its layer demands, and returns the largest. */
INLINE float adjust_scores(
    const Shape *shape, const Step *step, const float *slopes, int64_t row, float *scores) {
    const int32_t last = (int32_t)(step->position + row / step->heads);
    const int32_t first = shape->window > 0 ? last - (int32_t)shape->window + 1 : 0;
    Ints places;
    for (int i = 0; i < LANES; i++) places[i] = i;
    Floats parts[2];
    for (int v = 0; v < 2; v++) {
        const Ints keys = places + v * LANES;
        Floats part = load_float(scores + v * LANES);
        if (shape->soft_cap > 0.0f) part = tanh_of(part / shape->soft_cap) * shape->soft_cap;
        if (slopes)
            part += slopes[row % step->heads] * __builtin_convertvector(keys - last, Floats);
        if (first > 0 || last < KEYS - 1) {
            const Ints is_seen = (keys >= first) & (keys <= last);
            const Ints hidden = (Ints)((Floats){0} - INFINITY);
            part = (Floats)(((Ints)part & is_seen) | (hidden & ~is_seen));
        }
        store_all_float(scores + v * LANES, part);
        parts[v] = part;
    }
    return largest_of(larger(parts[0], parts[1]));
}

/* Writes the weights of a row, relative to the largest score, and returns them added up in part. */
INLINE Floats weigh_row(const Room *room, int64_t row) {
    const float *scores = room->scores + row * KEYS;
    const Floats first = exp_below_zero(load_float(scores) - room->tops[row]);
    const Floats second = exp_below_zero(load_float(scores + LANES) - room->tops[row]);
    put_weights(room, row, first, second);
    return first + second;
}

/* Weighs the scores of all rows of a step, LANES at a time: a vector holds their largest ones. */
INLINE void weigh_rows(
    const Shape *shape, const Room *room, const Step *step, const float *slopes) {
    for (int64_t row = step->first_row; row < step->stop_row; row += LANES) {
        const int64_t num_left = step->stop_row - row, num_rows = num_left < LANES ? num_left : LANES;
        float found[LANES], added[LANES] = {0};
        for (int64_t r = 0; r < LANES; r++)
            found[r] = r < num_rows ? adjust_scores(
                                          shape, step, slopes, row + r,
                                          room->scores + (row + r) * KEYS)
                                    : -INFINITY;
        const Floats before = load_float(room->tops + row), tops = larger(before, load_float(found));
        const Floats shrinks = exp_below_zero(before - tops);
        store_all_float(room->tops + row, tops);
        store_all_float(room->shrinks + row, shrinks);
        for (int64_t r = 0; r < num_rows; r += 4) {
            Floats parts[4] = {{0}};
            for (int64_t i = 0; i < 4 && r + i < num_rows; i++)
                parts[i] = weigh_row(room, row + r + i);
            sums_of_four(parts[0], parts[1], parts[2], parts[3], added + r);
        }
        for (int64_t r = 0; r < num_rows; r++)
            room->sums[row + r] = room->sums[row + r] * room->shrinks[row + r] + added[r];
    }
}
