#include "sched/states.h"

#include "base/base.h"

struct transition {
    int from;
    int to;
};

#define IS_IN(table, from, to) is_in(table, LH_COUNT_OF(table), (int)(from), (int)(to))

static bool is_in(const struct transition *table, size_t count, int from, int to)
{
    for (size_t i = 0; i < count; i++) {
        if (table[i].from == from && table[i].to == to)
            return true;
    }
    return false;
}

bool lh_states_unit_may(enum lh_unit_state from, enum lh_unit_state to)
{
    static const struct transition table[] = {
        {LH_UNIT_STATE_ABSENT, LH_UNIT_STATE_LOADING},
        {LH_UNIT_STATE_LOADING, LH_UNIT_STATE_READY},
        {LH_UNIT_STATE_READY, LH_UNIT_STATE_UPDATING},
        {LH_UNIT_STATE_UPDATING, LH_UNIT_STATE_READY},
        {LH_UNIT_STATE_READY, LH_UNIT_STATE_ABSENT},
        {LH_UNIT_STATE_UPDATING, LH_UNIT_STATE_ABSENT},
    };
    return IS_IN(table, from, to);
}

bool lh_states_chunk_may(enum lh_chunk_state from, enum lh_chunk_state to)
{
    static const struct transition table[] = {
        {LH_CHUNK_STATE_IDLE, LH_CHUNK_STATE_READING},
        {LH_CHUNK_STATE_READING, LH_CHUNK_STATE_LOADED},
        {LH_CHUNK_STATE_LOADED, LH_CHUNK_STATE_READING},
        {LH_CHUNK_STATE_LOADED, LH_CHUNK_STATE_COMPUTING},
        {LH_CHUNK_STATE_COMPUTING, LH_CHUNK_STATE_COMPUTED},
        {LH_CHUNK_STATE_COMPUTED, LH_CHUNK_STATE_WRITING},
        {LH_CHUNK_STATE_LOADED, LH_CHUNK_STATE_WRITING},
        {LH_CHUNK_STATE_WRITING, LH_CHUNK_STATE_LOADED},
        {LH_CHUNK_STATE_WRITING, LH_CHUNK_STATE_IDLE},
        {LH_CHUNK_STATE_LOADED, LH_CHUNK_STATE_IDLE},
        {LH_CHUNK_STATE_COMPUTED, LH_CHUNK_STATE_IDLE},
    };
    return IS_IN(table, from, to);
}

bool lh_states_step_may(enum lh_step_state from, enum lh_step_state to)
{
    static const struct transition table[] = {
        {LH_STEP_STATE_OPEN, LH_STEP_STATE_CLOSED},
        {LH_STEP_STATE_CLOSED, LH_STEP_STATE_COMMITTING},
        {LH_STEP_STATE_CLOSED, LH_STEP_STATE_OPEN},
        {LH_STEP_STATE_COMMITTING, LH_STEP_STATE_OPEN},
        {LH_STEP_STATE_OPEN, LH_STEP_STATE_COMMITTING},
        {LH_STEP_STATE_OPEN, LH_STEP_STATE_ABORTING},
        {LH_STEP_STATE_ABORTING, LH_STEP_STATE_OPEN},
    };
    return IS_IN(table, from, to);
}

bool lh_states_copy_may(enum lh_copy_state from, enum lh_copy_state to)
{
    static const struct transition table[] = {
        {LH_COPY_STATE_ABSENT, LH_COPY_STATE_COPYING}, {LH_COPY_STATE_COPYING, LH_COPY_STATE_READY},
        {LH_COPY_STATE_READY, LH_COPY_STATE_ABSENT},   {LH_COPY_STATE_READY, LH_COPY_STATE_LEAVING},
        {LH_COPY_STATE_LEAVING, LH_COPY_STATE_ABSENT},
    };
    return IS_IN(table, from, to);
}

bool lh_states_spill_may(enum lh_spill_state from, enum lh_spill_state to)
{
    static const struct transition table[] = {
        {LH_SPILL_STATE_NONE, LH_SPILL_STATE_RUNNING},
        {LH_SPILL_STATE_RUNNING, LH_SPILL_STATE_DONE},
        {LH_SPILL_STATE_RUNNING, LH_SPILL_STATE_NONE},
        {LH_SPILL_STATE_DONE, LH_SPILL_STATE_NONE},
    };
    return IS_IN(table, from, to);
}

bool lh_states_norm_may(enum lh_norm_state from, enum lh_norm_state to)
{
    static const struct transition table[] = {
        {LH_NORM_STATE_NONE, LH_NORM_STATE_RUNNING},
        {LH_NORM_STATE_RUNNING, LH_NORM_STATE_DONE},
        {LH_NORM_STATE_DONE, LH_NORM_STATE_NONE},
    };
    return IS_IN(table, from, to);
}

bool lh_states_saved_may(enum lh_saved_state from, enum lh_saved_state to)
{
    static const struct transition table[] = {
        {LH_SAVED_STATE_FREE, LH_SAVED_STATE_QUEUED},
        {LH_SAVED_STATE_QUEUED, LH_SAVED_STATE_COPYING},
        {LH_SAVED_STATE_QUEUED, LH_SAVED_STATE_SUMMING},
        {LH_SAVED_STATE_COPYING, LH_SAVED_STATE_SUMMING},
        {LH_SAVED_STATE_COPYING, LH_SAVED_STATE_HELD},
        {LH_SAVED_STATE_SUMMING, LH_SAVED_STATE_HELD},
        {LH_SAVED_STATE_HELD, LH_SAVED_STATE_WRITING},
        {LH_SAVED_STATE_WRITING, LH_SAVED_STATE_HELD},
        {LH_SAVED_STATE_HELD, LH_SAVED_STATE_AWAY},
        {LH_SAVED_STATE_AWAY, LH_SAVED_STATE_READING},
        {LH_SAVED_STATE_READING, LH_SAVED_STATE_HELD},
        {LH_SAVED_STATE_HELD, LH_SAVED_STATE_FREE},
        {LH_SAVED_STATE_AWAY, LH_SAVED_STATE_FREE},
    };
    return IS_IN(table, from, to);
}
