//! User whose request the current task carries out. Entries of the journal name this user, so that
//! no service has to pass the name on.

tokio::task_local! {
    static REQUESTER: String;
}

/// Carries out work for a request of this user.
pub(crate) async fn serve<T>(who: String, work: impl Future<Output = T>) -> T {
    REQUESTER.scope(who, work).await
}

/// Returns work for another task that names the user of this one.
pub(crate) fn kept<T>(work: impl Future<Output = T>) -> impl Future<Output = T> {
    let who = current();
    async move {
        match who {
            Some(who) => serve(who, work).await,
            None => work.await,
        }
    }
}

/// Returns the user whose request the current task carries out, if any.
pub(crate) fn current() -> Option<String> {
    REQUESTER.try_with(String::clone).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn another_task_names_the_user_only_if_it_is_kept() {
        assert_eq!(current(), None);
        let seen = serve("ana".to_owned(), async {
            let kept = tokio::spawn(kept(async { current() })).await.unwrap();
            let other = tokio::spawn(async { current() }).await.unwrap();
            (kept, other)
        });
        assert_eq!(seen.await, (Some("ana".to_owned()), None));
    }
}
