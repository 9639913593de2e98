#include "rig_team.h"

#include "lh_test.h"
#include "rig_wait.h"

struct lh_team *rig_team_open(struct rig *rig)
{
    const struct rig *owner = rig->opts.team_of;
    if (!owner && rig->opts.team_mates == 0)
        return NULL;
    struct lh_team *team = calloc(1, sizeof(*team));
    LH_CHECK(team);
    if (owner) {
        struct lh_team *of = owner->team;
        LH_CHECK(lh_team_join(dup(of->fd), rig->opts.team_mate, team, NULL) == 0);
        team->bells[0] = owner->waker.fd;
        of->bells[team->mate] = rig->waker.fd;
        return team;
    }
    struct lh_team_opts opts = {.unit_count = RIG_UNIT_COUNT,
                                .mate_count = rig->opts.team_mates,
                                .region_bytes = rig->budget.region_bytes};
    LH_CHECK(lh_team_create(&opts, team, NULL) == 0);
    return team;
}

void rig_team_close(struct rig *rig)
{
    if (!rig->team)
        return;
    lh_team_leave(rig->team);
    free(rig->team);
    rig->team = NULL;
}

void rig_team_give_back(struct rig *rig)
{
    LH_CHECK(rig_flush(rig, false) == 0); /* messages about earlier uses are handled */
    rig_pause(rig);
    lh_borrow_give_back(rig->engine);
    lh_engine_resume(rig->engine);
}

void rig_team_follow(struct rig *mate, const struct rig *owner)
{
    int rc = 0;
    rig_wait_begin(mate);
    while (rig_waits(mate, lh_team_step(mate->team) > mate->step))
        usleep(100);
    rig_wait_begin(mate);
    do {
        rc = lh_engine_close(mate->engine, "", 0, rig_slice_ms(mate));
    } while (rig_waits(mate, rc));
    LH_CHECK(rc == 1);
    mate->step++;
    LH_CHECK(owner->step == mate->step);
    memcpy(mate->state, owner->state, mate->state_bytes);
}
