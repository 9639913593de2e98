/* Declarations that the parts of a member share: private to member*.c. */
#ifndef LH_SIM_MEMBER_PRIVATE_H
#define LH_SIM_MEMBER_PRIVATE_H

#include "sim/member.h"

bool lh_sim_member_is_mate(const struct lh_sim_member *member);

/* member_step.c */
/* A gradient was computed: it leaves for the nodes that add it. */
void lh_sim_member_gradient_send(struct lh_sim_member *member, uint32_t param);
void lh_sim_member_stage_set(struct lh_sim_member *member, enum lh_sim_member_stage stage);
/* Poll the state PEERS of the script. Returns true if anything happened. */
bool lh_sim_member_stage_poll(struct lh_sim_member *member);
/* Whether the training thread is in a wait function of the engine. */
bool lh_sim_member_waits(const struct lh_sim_member *member);
void lh_sim_member_departures_free(struct lh_sim_member *member);

#endif
