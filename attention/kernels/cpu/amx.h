/*
 * Tiles of AMX (Intel 64 and IA-32 Architectures Software Developer's Manual, chapter 18): eight
 * registers of 16 rows of 64 bytes, and the product of two of them. With EMULATE_AMX, plain C stands
 * in for the instructions, so that what is built on them is tested on any CPU.
 */
#ifndef PAGEDRAY_AMX_H
#define PAGEDRAY_AMX_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE_ROWS 16
#define TILE_ROW_BYTES 64

#ifdef __AMX_BF16__
#include <immintrin.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

/* All tiles have their full size. It is constant, since compilers may drop stores to a local one. */
static const TileConfig tile_config = {
    .palette = 1,
    .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

/* To be called by each thread before it uses tiles. */
static inline void begin_tiles(void) { _tile_loadconfig(&tile_config); }

/* Until this is called, Linux saves the tiles of a thread that it suspends. */
static inline void end_tiles(void) { _tile_release(); }

/* Makes the compiler store what loads of tiles read: it does not know that they read memory. */
#define SYNC_TILES() __asm__ volatile("" : : : "memory")
#define ZERO_TILE(tile) _tile_zero(tile)
#define LOAD_TILE(tile, from, stride) _tile_loadd(tile, from, stride)
/* Loads what is soon not needed again, and leaves more of the nearest cache to other data. */
#define STREAM_TILE(tile, from, stride) _tile_stream_loadd(tile, from, stride)
#define STORE_TILE(tile, to, stride) _tile_stored(tile, to, stride)
/* sums[m][n] += x[m][2k] * y[k][2n] + x[m][2k + 1] * y[k][2n + 1], floats and bfloats. */
#define ADD_TILES(sums, x, y) _tile_dpbf16ps(sums, x, y)
#elif defined(EMULATE_AMX)
static _Thread_local uint32_t tiles[8][TILE_ROWS][TILE_ROW_BYTES / 4];
static _Thread_local int can_use_tiles;

static inline void begin_tiles(void) { can_use_tiles = 1; }

static inline void end_tiles(void) {
    if (!can_use_tiles) abort();
    can_use_tiles = 0;
}

static inline void zero_tile(int tile) {
    if (!can_use_tiles) abort();
    memset(tiles[tile], 0, sizeof tiles[tile]);
}

static inline void load_tile(int tile, const void *from, int64_t stride) {
    if (!can_use_tiles) abort();
    for (int m = 0; m < TILE_ROWS; m++)
        memcpy(tiles[tile][m], (const char *)from + m * stride, TILE_ROW_BYTES);
}

static inline void store_tile(int tile, void *to, int64_t stride) {
    for (int m = 0; m < TILE_ROWS; m++)
        memcpy((char *)to + m * stride, tiles[tile][m], TILE_ROW_BYTES);
}

static inline float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void add_tiles(int sums, int x, int y) {
    for (int m = 0; m < TILE_ROWS; m++)
        for (int n = 0; n < TILE_ROW_BYTES / 4; n++) {
            float sum = bits_to_float(tiles[sums][m][n]);
            for (int k = 0; k < TILE_ROWS; k++) {
                const uint32_t a = tiles[x][m][k], b = tiles[y][k][n];
                sum += bits_to_float(a << 16) * bits_to_float(b << 16);
                sum += bits_to_float(a & 0xffff0000u) * bits_to_float(b & 0xffff0000u);
            }
            memcpy(&tiles[sums][m][n], &sum, sizeof sum);
        }
}

#define SYNC_TILES()
#define ZERO_TILE(tile) zero_tile(tile)
#define LOAD_TILE(tile, from, stride) load_tile(tile, from, stride)
#define STREAM_TILE(tile, from, stride) load_tile(tile, from, stride)
#define STORE_TILE(tile, to, stride) store_tile(tile, to, stride)
#define ADD_TILES(sums, x, y) add_tiles(sums, x, y)
#endif

#endif
