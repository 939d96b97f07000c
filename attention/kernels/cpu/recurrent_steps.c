/*
 * Layers with recurrent state on the CPU: causal convolutions, and delta rules and selective
 * scans of one token. A state is read and written once.
 */
#include <math.h>

#include "lanes.h"

/* Number of elements above which several threads are faster than one. */
#define MANY 65536
/* Largest width of a convolution. */
#define WIDTH 4
/* Channels that a thread convolves at a time, and the largest size of a key. */
#define CHANNELS 256
#define KEYS 512
/* As CHUNK_SIZE in arguments.py. */
#define CHUNK 64

#define ELEMENT float
#define NAME(x) x##_float
#include "recurrent_steps_body.h"
#undef ELEMENT
#undef NAME

#define ELEMENT uint16_t
#define NAME(x) x##_bfloat
#include "recurrent_steps_body.h"
