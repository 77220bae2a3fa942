#include "ring.h"

void ring_clear(struct ring *ring)
{
    ring->first = 0;
    ring->count = 0;
}

bool ring_put(struct ring *ring, int item)
{
    if (ring->first + ring->count >= RING_SIZE)
        return false;
    ring->items[ring->first + ring->count] = item;
    ring->count++;
    return true;
}

bool ring_take(struct ring *ring, int *item)
{
    if (ring->count == 0)
        return false;
    *item = ring->items[ring->first];
    ring->first++;
    ring->count--;
    return true;
}
