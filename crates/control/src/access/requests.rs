//! Operations on tokens and the audit log.

use std::sync::Arc;

use godwit_api::control::{AuditEntry, CreateToken, CreatedToken, Problem, ProblemCode, TokenInfo};

use super::known_tokens::KnownTokens;
use super::record::{SavedToken, TOKENS};
use super::{Caller, Secret, TokenRecord};
use crate::clock::now_unix_ms;
use crate::cluster::names::check_name;
use crate::storage::keeper::Keeper;
use crate::storage::planning::Planning;
use crate::storage::term::Term;

/// Length of a day, milliseconds.
const DAY_MS: u64 = 24 * 3600 * 1000;

/// Services behind the requests for tokens and the audit log.
#[derive(Clone)]
pub(crate) struct AccessRequests {
    tokens: Arc<KnownTokens>,
    keeper: Arc<Term<Keeper>>,
    planning: Planning,
}

impl AccessRequests {
    pub(crate) fn new(
        tokens: Arc<KnownTokens>,
        keeper: Arc<Term<Keeper>>,
        planning: Planning,
    ) -> AccessRequests {
        AccessRequests { tokens, keeper, planning }
    }

    /// Returns all tokens, without their secrets.
    pub(crate) fn tokens(&self) -> Vec<TokenInfo> {
        self.tokens.infos()
    }

    pub(crate) async fn create_token(
        &self,
        request: CreateToken,
        caller: &Caller,
    ) -> Result<CreatedToken, Problem> {
        check_name(&request.name)?;
        if matches!(request.name.as_str(), "root" | "nobody") {
            let detail = format!(
                "cannot name a token {}: the audit log uses this name for other callers",
                request.name
            );
            return Err(Problem::new(ProblemCode::InvalidRequest, detail, "choose another name"));
        }
        let secret = Secret::draw()?;
        let now = now_unix_ms();
        let good = now..now + u64::from(request.days) * DAY_MS;
        let record = TokenRecord::new(&secret, &request.name, request.role, &caller.name, good);
        let access = self.clone();
        self.planning
            .change(|keeper| async move {
                keeper.insert(TOKENS, secret.id(), &SavedToken::from(&record)).await?;
                let info = record.info.clone();
                access.tokens.know(record);
                Ok(CreatedToken { info, token: secret.reveal() })
            })
            .await
    }

    pub(crate) async fn revoke_token(&self, id: &str) -> Result<(), Problem> {
        let id = id.to_owned();
        let access = self.clone();
        self.planning
            .change(|keeper| async move {
                if !access.tokens.infos().iter().any(|token| token.id == id) {
                    let detail = format!("no token {id}");
                    return Err(Problem::new(
                        ProblemCode::NotFound,
                        detail,
                        "see `godwit control token list`",
                    ));
                }
                keeper.remove(TOKENS, &id).await?;
                access.tokens.forget(&id);
                Ok(())
            })
            .await
    }

    /// Returns a page of the audit log, the newest entry first.
    pub(crate) async fn audit_page(
        &self,
        behind: Option<&str>,
        limit: usize,
    ) -> Result<(Vec<AuditEntry>, Option<String>), Problem> {
        self.keeper.get()?.audit_page(behind, limit).await
    }
}
