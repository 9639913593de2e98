/* Several rigs whose engines share parameters, as processes of one machine do (team/team.h). */
#ifndef LH_TEST_RIG_TEAM_H
#define LH_TEST_RIG_TEAM_H

#include "engine_fixture.h"

/*
 * Join the team of rig->opts.team_of, or make one with rig->opts.team_mates mates. NULL: neither.
 * The owner's mates must be made before it ends a step.
 */
struct lh_team *rig_team_open(struct rig *rig);
/* NULL is allowed. */
void rig_team_close(struct rig *rig);

/* Give back all units of a mate, none of which is pinned. */
void rig_team_give_back(struct rig *rig);
/*
 * A mate's part of the owner's step: wait until it is over, and close the step without gradients.
 * The mate's expected state becomes the owner's.
 */
void rig_team_follow(struct rig *mate, const struct rig *owner);

#endif
