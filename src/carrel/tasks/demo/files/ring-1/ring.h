/* A queue of numbers with a fixed size: the oldest is taken first. */
#ifndef RING_H
#define RING_H

#include <stdbool.h>
#include <stddef.h>

#define RING_SIZE 4

struct ring {
    int items[RING_SIZE];
    size_t first;
    size_t count;
};

void ring_clear(struct ring *ring);
bool ring_put(struct ring *ring, int item);  /* false when it is full */
bool ring_take(struct ring *ring, int *item); /* false when it is empty */

#endif
