/* Which samples of an epoch's order are a consumer's: the positions that its stream reads. */
#include "stream/stream.h"

/* Returns the position in the epoch of the consumer's sample with this ordinal number. */
static uint64_t position_of(const dlfs_stream_config *config, uint64_t ordinal)
{
    if (config->group == 0) {
        return config->first + ordinal * config->stride;
    }
    return config->first + ordinal / config->group * config->group_stride +
           ordinal % config->group * config->stride;
}

int stream_indices(const dlfs_stream_config *config, uint64_t ordinal, uint64_t count,
                   uint64_t *out)
{
    int code = 0;
    while (code == 0 && count > 0) {
        uint64_t here = config->group ? config->group - ordinal % config->group : count;
        here = here < count ? here : count;
        code = dlfs_sequence_fill(config->sequence, position_of(config, ordinal), config->stride,
                                  here, out);
        ordinal += here;
        out += here;
        count -= here;
    }
    return code;
}

bool stream_fits(const dlfs_stream_config *config, uint64_t total)
{
    if (config->count == 0) {
        return true;
    }
    if (config->first >= total) {
        return false;
    }
    uint64_t left = total - 1 - config->first;
    uint64_t last = config->count - 1;
    if (config->group == 0) {
        return last <= left / config->stride;
    }
    if (config->group_stride == 0 ||
        (config->group > 1 && config->stride > (config->group_stride - 1) / (config->group - 1))) {
        return false;
    }
    uint64_t groups = last / config->group;
    if (groups > left / config->group_stride) {
        return false;
    }
    return last % config->group <= (left - groups * config->group_stride) / config->stride;
}
